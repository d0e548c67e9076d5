"""Attention forward for Hopper over few keys: every warp multiplies, several CTAs share an SM.

A tile of few keys is over before roles, messages and turns pay: here all warps run the same steps one after the
other (product, softmax, product), a thread of theirs starts the copies of the next tile as soon as a place is
free, and CTAs that share an SM overlap each other.

| file | what it is |
| --- | --- |
| forward.py | from an operator's arguments to a launch |
| kernel.py | the kernel |
| order.py | which tiles a CTA takes, which keys it loads next |
"""
