#!/bin/bash
# Tensor parallelism on the GPUs of one machine, checked and timed:
#
#     benchmarks/run_tp.sh [TP] [OUT]                    # 2 GPUs, benchmarks/results
#     PARTS="checks" BUDGET=400 benchmarks/run_tp.sh 4 /tmp/tp4
#
# PARTS   links   SGLang's all-reduce between these GPUs, eagerly and in graphs        links_tpN.json
#         checks  exactness for 1 and N GPUs, a storm of replays, whole refusals       exactness_tpN.json and
#                                                                                      tp_checks_tpN.json
#         every   exactness for 1 and N GPUs of an adapter of every method             the same, every_tpN.json
#         decode  time per token of the base, ours, csgmv and triton, 8B shape         decode_tpN.json
# BUDGET  seconds for all parts together; a part gets what the ones before it left.
# PATCH_STOCK_LOADER=1  edits the installed SGLang: without it, its own backends read no adapter beside a dummy base.
#
# Exit status: 0 if every part is ok. Results are written row by row, so a part that is cut short keeps them.
cd "$(dirname "$0")/.." || exit
TP=${1:-2} OUT=${2:-benchmarks/results} PARTS=${PARTS:-links checks decode} BUDGET=${BUDGET:-480}
mkdir -p "$OUT"
failed=0 flags=()

part() {  # NAME COMMAND...: runs a part in the time that is left, its output to the terminal and to a log
  local name=$1 left=$((BUDGET - SECONDS)) status
  shift
  if ((left < 30)); then echo "== $name: skipped, ${left} s left"; return 1; fi
  echo "== $name, ${left} s left"
  timeout --kill-after=10 "$left" "$@" 2>&1 | tee "$OUT/$name.log" |
    grep --line-buffered -vE "WARN|[Ww]arn|Ignore import|it/s\]"
  status=${PIPESTATUS[0]}
  echo "== $name: status $status after $SECONDS s"
  return "$status"
}

for name in $PARTS; do
  case $name in
    links)
      part links python3 benchmarks/tp_links.py --tp "$TP" --out "$OUT"
      case $? in 0) ;; 2) flags=(--disable-custom-all-reduce) failed=1 ;; *) failed=1 ;; esac ;;
    checks)
      part checks python3 benchmarks/tp_checks.py --tp "$TP" --out "$OUT" "${flags[@]}" || failed=1 ;;
    every)
      part every python3 benchmarks/tp_checks.py --tp "$TP" --adapters every --out "$OUT" "${flags[@]}" || failed=1 ;;
    decode)
      part decode python3 benchmarks/bench_decode.py --tp "$TP" --backends scute csgmv triton --again \
        --workloads none_bs16 lora_r16x16_bs16 lora_r16x20_bs20 mix5x20_bs20 \
        --out "$OUT/decode_tp$TP.json" --scratch /dev/shm/scute_tp "${flags[@]}" ${PATCH_STOCK_LOADER:+--patch-stock-loader} || failed=1 ;;
    *) echo "unknown part $name"; exit 2 ;;
  esac
done
exit $failed
