#!/bin/bash
# Run the GPU tests in phases, on a machine that is lent for minutes: run_on_device.sh [OPTION...]
#
#   --out DIR         what is kept: gpu_suite.json, summary.txt, logs.tar.xz, jit.tar.xz
#                     (default: $OUT, or else out)
#   --phases A,B,...  which, in this order (default: all; --list shows them)
#   --within S        start no phase after S seconds, and cut the last one off (default 3600)
#   --jit FILE        compiled kernels that an earlier run kept as jit.tar.xz
#   --pytest "ARGS"   more arguments for every phase, such as "-x"
#   --list            show the phases with their limits
#
# Each phase is a pytest of its own, so that one that hangs or breaks the GPU's context does not take
# the others along. One that reaches its limit is interrupted, says what its servers do, and 30 s
# later it is killed with all that it started. PYTHON is the Python with SGLang (default: python3).
# Ends with 1 where a phase failed.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-out} chosen= within=3600 jit= more=
patience=${PHASE_PATIENCE_S:-10}
fast="gpu and not slow"

# Name, limit in seconds, marks, and what pytest runs.
phases() {
    cat <<EOF
kernels 60 $fast: test/gpu/test_cuda_ipc_kernels.py test/gpu/test_full_queue.py
contract 90 gpu: test/contract
stress 230 gpu and slow: test/gpu/test_cuda_ipc_stress.py
sanitizer 200 gpu: test/gpu/test_cuda_ipc_sanitizer.py
covering 270 $fast: test/gpu/test_zygote.py test/gpu/test_covering_set.py
faults 200 $fast: test/gpu/test_faults.py test/gpu/test_padding.py test/gpu/test_fp8.py test/gpu/test_hidden_states.py
restart 220 $fast: test/gpu/test_restart.py test/gpu/test_rank_restart.py
launch 200 $fast: test/gpu/test_launch.py
fatal 200 gpu: test/gpu/test_fatal_fault.py
EOF
}

# Not run unless chosen.
others() {
    cat <<EOF
suite 540 $fast: test/gpu
queue 90 gpu and slow: test/gpu/test_full_queue.py
killrank 150 gpu and slow: test/gpu/test_rank_restart.py
large 200 gpu and slow: test/gpu/test_launch.py
EOF
}

while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2; shift 2 ;;
        --phases) chosen=${2//,/ }; shift 2 ;;
        --within) within=$2; shift 2 ;;
        --jit) jit=$2; shift 2 ;;
        --pytest) more=$2; shift 2 ;;
        --list) phases; echo "unless chosen, not:"; others; exit 0 ;;
        *) sed -n '2,/^set/p' "$0" | grep '^#'; exit 2 ;;
    esac
done
[ -n "$chosen" ] || chosen=$(phases | cut -d' ' -f1)
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
temporary=${TMPDIR:-/tmp}
cd "$root" || exit 2
export PYTHONPATH="$root:$root/test/support${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mark=SGLANG_AFD_PHASE=$$-$RANDOM$RANDOM # every process of a phase inherits it

restore_jit() {
    [ -z "$jit" ] || { tar xJf "$jit" -C "$HOME" --exclude='tmp/*' && tar xJf "$jit" -C / --wildcards 'tmp/*'; } \
        || echo "no compiled kernels: $jit cannot be unpacked"
}

save_jit() {
    local names=() name
    for name in .triton .cache/flashinfer; do [ -d "$HOME/$name" ] && names+=(-C "$HOME" "$name"); done
    for name in "$temporary"/torchinductor_*; do [ -d "$name" ] && names+=(-C / "${name#/}"); done
    [ ${#names[@]} -eq 0 ] || tar cf - "${names[@]}" 2>/dev/null | xz -T0 -6 >"$out/jit.tar.xz"
}

left_over() { # processes of this run, told by the mark in their environment
    grep -lsz "^$mark\$" /proc/[0-9]*/environ | cut -d/ -f3
}

# Ends what a phase left. MPS daemons and servers of a phase that was killed end by themselves soon.
sweep() {
    local pid tries=$((patience * 2))
    while [ "$tries" -gt 0 ] && [ -n "$(left_over)" ]; do
        sleep 0.5
        tries=$((tries - 1))
    done
    for pid in $(left_over); do
        if kill -9 "$pid" 2>/dev/null; then echo "was left running: $pid"; fi
    done
}

run_phase() { # name, limit, marks, paths...
    local name=$1 limit=$2 marks=$3 began=$SECONDS left=$((within - SECONDS)) code
    shift 3
    mkdir -p "$work/$name"
    if [ "$left" -lt 20 ]; then
        echo "not run: no time was left" >"$work/$name/not_run"
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "==== $name, at most $limit s"
    # shellcheck disable=SC2086
    OUT="$work/$name" timeout --foreground -s INT -k 30 "$limit" \
        env --default-signal=INT "$mark" "$python" -m pytest -s -m "$marks" \
        --basetemp="$work/$name/tmp" --junitxml="$work/$name/junit.xml" -o junit_logging=no $more "$@" \
        >"$work/$name/log" 2>&1
    code=$?
    sweep >>"$work/$name/log"
    echo "$code $((SECONDS - began))" >"$work/$name/ended"
    grep -E '^(FAILED|ERROR) |^\[ *[0-9.]+ s\] .*: (ready|done)' "$work/$name/log" | cut -c1-300
    tail -n 1 "$work/$name/log" | cut -c1-300
    # What servers printed is kept in full where something failed.
    if [ "$code" != 0 ]; then
        mkdir -p "$work/$name/servers"
        find "$work/$name/tmp" -name '*.log' -exec cp {} "$work/$name/servers/" \;
    fi
    rm -rf "$work/$name/tmp"
}

restore_jit
for name in $chosen; do
    line=$({ phases; others; } | grep "^$name ") || { echo "no phase is called $name"; exit 2; }
    set -f
    # shellcheck disable=SC2086
    set -- ${line#*: }
    set +f
    head=${line%%: *}
    rest=${head#* }
    run_phase "$name" "${rest%% *}" "${rest#* }" "$@"
done
save_jit
"$python" test/support/gpu_summary.py "$work" "$out/gpu_suite.json" $chosen >"$out/summary.txt"
failed=$?
tar cf - -C "$work" . | xz -T0 -3 >"$out/logs.tar.xz"
rm -rf "$work"
cat "$out/summary.txt"
ls -l "$out"
exit $failed
