"""Operators measured one by one, beside peers: `rooftile bench ops`.

| file | what it is |
| --- | --- |
| suite.py | what an operator's measurements consist of: cases, contenders, a check |
| registry.py | the suites by name |
| attention.py | the suite of `attention` and `attention_varlen` |
| paged.py | the suites of `paged_attention` and its plans |
| gemm.py | the suite of `matmul` |
| gemm_plot.py | SM timelines of matrix products |
| stream.py | a kernel that only reads |
| floor_plot.py | times against those of a kernel that only reads |
| decode_plot.py | SM timelines of plans |
| timing.py | functions timed in turn, with flushed caches |
| run.py | a case: checked first, then timed, as rows |
| plot.py | rows as the bar charts of the FlashAttention papers |
"""
