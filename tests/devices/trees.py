"""The files by which a box is recognised, as such boxes have them. Texts of a device tree end with NUL."""

from __future__ import annotations

from pathlib import Path

Files = dict[str, str]


def meminfo(total_kib: int, available_kib: int) -> str:
    return (
        f"MemTotal:       {total_kib} kB\nMemFree:          211340 kB\nMemAvailable:   {available_kib} kB\n"
        "Buffers:           53012 kB\nHugePages_Total:       0\n"
    )


JETSON_ORIN_NANO: Files = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 3.0, GCID: 36923193, BOARD: generic, EABI: aarch64\n# more\n",
    "proc/meminfo": meminfo(7802772, 6400000),
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
}
JETSON_ORIN_NANO_4GB: Files = JETSON_ORIN_NANO | {
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0004\0nvidia,p3767-0004\0nvidia,tegra234\0",
    "proc/meminfo": meminfo(3666000, 2900000),
}
JETSON_ORIN_NX: Files = JETSON_ORIN_NANO | {
    "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0nvidia,tegra234\0",
    "proc/meminfo": meminfo(15946000, 13000000),
}
JETSON_AGX_ORIN: Files = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
    "etc/nv_tegra_release": "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64\n",
    "proc/meminfo": meminfo(64337344, 60000000),
}
RASPBERRY_PI_5: Files = {
    "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
    "proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
    "proc/meminfo": meminfo(8245472, 7300000),
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-1.scope\n",
    "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
}
# Docker hides /sys/firmware, where /proc/device-tree leads.
RASPBERRY_PI_5_CONTAINER: Files = {
    "proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd0b\n\n"
    "Revision\t: d04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
    "proc/meminfo": RASPBERRY_PI_5["proc/meminfo"],
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/fs/cgroup/memory.max": "max\n",
}
RASPBERRY_PI_5_4GB: Files = RASPBERRY_PI_5 | {"proc/meminfo": meminfo(4147936, 3500000)}
JETSON_ORIN_NANO_CONTAINER: Files = {
    "sys/devices/soc0/machine": "NVIDIA Jetson Orin Nano Developer Kit\n",
    "etc/nv_tegra_release": JETSON_ORIN_NANO["etc/nv_tegra_release"],
    "proc/meminfo": JETSON_ORIN_NANO["proc/meminfo"],
    "proc/self/cgroup": "0::/\n",
}
WORKSTATION: Files = {
    "sys/class/dmi/id/sys_vendor": "Micro-Star International Co., Ltd.\n",
    "sys/class/dmi/id/product_name": "MS-7D25\n",
    "sys/class/dmi/id/board_name": "PRO Z690-A\n",
    "proc/meminfo": meminfo(65600000, 58000000),
}
NVIDIA_WORKSTATION: Files = WORKSTATION | {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: GeForce\n"}
CONTAINER_V2: Files = WORKSTATION | {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/memory.max": "4294967296\n",
}
CONTAINER_V1: Files = WORKSTATION | {
    "proc/self/cgroup": "5:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
}
UNKNOWN_BOARD: Files = {
    "proc/device-tree/model": "Radxa ROCK 5B\0",
    "proc/device-tree/compatible": "radxa,rock-5b\0rockchip,rk3588\0",
    "proc/meminfo": meminfo(16220000, 15000000),
}


def plant(root: Path, files: Files) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
