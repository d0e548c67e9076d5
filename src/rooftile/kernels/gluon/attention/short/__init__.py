"""Attention forward for Hopper where all keys are one tile: every warp multiplies, several CTAs share an SM.

Such a tile is over before roles, messages and turns pay, and needs no running maximum. Four warps take its steps
one after the other (product, softmax, product); a thread of theirs starts the copies of the next tile's queries,
keys and values as soon as their places are free; and CTAs that share an SM overlap each other.

| file | what it is |
| --- | --- |
| forward.py | from an operator's arguments to a launch |
| kernel.py | the kernel |
| order.py | which tiles a CTA takes |
"""
