#!/usr/bin/env bash
# The GPU checks on a bare box: builds llama-cpp-python with CUDA, runs the tests marked gpu, prints tables of speed.
#   tests/gpu/run.sh [--dry-run] [--budget SECONDS] FOLDER [GGUF DRAFT]...
# FOLDER is what tests/gpu/carry.sh collected. Needs a GPU with its driver, CUDA's compiler, a C++ compiler and Python;
# no network. Each GGUF with its draft folder is measured after the starter pair. About six minutes on 16 cores; what
# the budget (600 s) has no time for is left out and named. --dry-run prints the commands and runs none.
set -euo pipefail

fail() { echo "run.sh: $*" >&2; exit 1; }
usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }

dry='' budget=600
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=1; shift ;;
        --budget)
            [ $# -ge 2 ] || fail "--budget needs a number of seconds"
            budget=$2; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        -*) fail "unknown option $1; see --help" ;;
        *) break ;;
    esac
done
[ $# -ge 1 ] || fail "FOLDER is missing; make it with tests/gpu/carry.sh"
[ $(($# % 2)) -eq 1 ] || fail "every GGUF needs its draft after it"
[[ $budget =~ ^[1-9][0-9]*$ ]] || fail "--budget: got '$budget'; allowed: a number of seconds"
[ -d "$1" ] || fail "no folder $1; make it with tests/gpu/carry.sh"
carried=$(cd "$1" && pwd)
shift
pairs=()
for path in "$@"; do
    [ -e "$path" ] || [ "$path" = lookup ] || fail "no file or folder $path"
    if [ "$path" = lookup ]; then pairs+=(lookup); else pairs+=("$(realpath "$path")"); fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

left() { echo $((budget - SECONDS)); }
step() { printf '\n== %s (%s s used of %s)\n' "$1" "$SECONDS" "$budget"; }
# A command with at most the time that is left, less what is kept for those after it.
run() {
    local kept=$1 limit
    shift
    limit=$(($(left) - kept))
    if [ -n "$dry" ]; then printf '+'; printf ' %q' "$@"; echo; return 0; fi
    [ "$limit" -gt 5 ] || fail "no time left for: $*; raise --budget"
    timeout --kill-after=10 "$limit" "$@"
}

step "what is here"
architecture=''
if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv || true
    architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | sort -u | head -n 1 | tr -d '. ') || true
elif [ -z "$dry" ]; then
    fail "no nvidia-smi: is this the box with the GPU?"
fi
[[ $architecture =~ ^[0-9]+$ ]] || architecture=90
nvcc=$(command -v nvcc || true)
[ -n "$nvcc" ] || { [ -x /usr/local/cuda/bin/nvcc ] && nvcc=/usr/local/cuda/bin/nvcc; } || [ -n "$dry" ] || fail "no nvcc; install CUDA's toolkit"
cores=$(nproc)
echo "architecture $architecture, $cores cores, ${nvcc:-no nvcc}, $(python3 --version)"

site=${SITE:-/tmp/edgespec-gpu/site}
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$site/bin${nvcc:+:$(dirname "$nvcc")}:$PATH"
export EDGESPEC_CACHE_DIR=${EDGESPEC_CACHE_DIR:-/tmp/edgespec-gpu/cache}
export PYTHONUNBUFFERED=1
pip=(python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site")

step "install what was carried"
shopt -s nullglob
wheels=("$carried"/*.whl)
shopt -u nullglob
[ ${#wheels[@]} -gt 0 ] || fail "$carried has no wheels; make it with tests/gpu/carry.sh"
run 0 "${pip[@]}" --find-links "$carried" "${wheels[@]}"

step "build llama-cpp-python"
# GCC 12 drops stores that AMX needs without the two flags; one architecture keeps the build short.
flags='-fno-tree-dse -fno-dse'
export CMAKE_BUILD_PARALLEL_LEVEL=$cores
export CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$architecture -DGGML_CUDA_NCCL=OFF -DGGML_RPC=ON -DCMAKE_C_FLAGS='$flags' -DCMAKE_CXX_FLAGS='$flags'"
cublas=$(compgen -G "$site/nvidia/cu*/lib" || true) # PyPI's cuBLAS, where the toolkit has none
if [ -n "$cublas" ]; then
    export LD_LIBRARY_PATH="$cublas${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" LIBRARY_PATH="$cublas${LIBRARY_PATH:+:$LIBRARY_PATH}"
    export CPATH="${cublas%/lib}/include${CPATH:+:$CPATH}"
fi
if compgen -G "$carried/llama_cpp_python-*.whl" > /dev/null; then
    echo "a wheel was carried: it is used as it is"
else
    source=${SOURCE:-/tmp/edgespec-gpu/source}
    run 180 mkdir -p "$source"
    run 180 tar -xJf "$carried/llama-cpp-python.tar.xz" -C "$source" --strip-components=1
    echo "CMAKE_ARGS=$CMAKE_ARGS"
    run 180 "${pip[@]}" --no-build-isolation "$source"
fi

step "devices"
run 150 python3 -c 'from edgespec.verifiers.llama_devices import list_devices
devices = list_devices()
print(*devices, sep="\n")
raise SystemExit(0 if any(d.kind == "gpu" for d in devices) else "llama.cpp lists no GPU: the build went wrong")'

step "tests"
failed=0
run 60 python3 -m pytest -m gpu tests/gpu -q -p no:cacheprovider -rs || failed=1

step "speed"
if [ -z "$dry" ] && ! python3 -c 'from edgespec.pairs import load_pair; load_pair("starter").verifier.find()' 2> /dev/null; then
    echo "left out: the starter model was not carried"
elif [ "$(left)" -lt 45 ]; then
    echo "left out: $(left) s are too little time"
else
    run 0 python3 -m tests.gpu.speed || failed=1
fi
for ((i = 0; i < ${#pairs[@]}; i += 2)); do
    step "speed of ${pairs[i]}"
    if [ "$(left)" -lt 60 ]; then echo "left out: $(left) s are too little time"; continue; fi
    run 0 python3 -m tests.gpu.speed "${pairs[i]}" "${pairs[i + 1]}" || failed=1
done

step "done"
exit "$failed"
