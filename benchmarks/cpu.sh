#!/bin/sh
# The figures of the CPU section of docs/performance.md, about six minutes on two idle cores:
#     sh benchmarks/cpu.sh llama-cpp,openvino      (peers that are installed; none: leave it out)
set -e
for bits in int4 int8 none; do
    rooftile bench engine -m demo --quantization $bits --repeats 3 --peers "$1" --save
done
python benchmarks/prefill_cpu.py
python benchmarks/attention_cpu.py
python benchmarks/quantiser_quality.py
rooftile bench quality -m demo
