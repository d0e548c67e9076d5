"""How many lanes a program gets whose lanes are the requests of a batch."""


def lanes_of(requests: int) -> int:
    """A power of two from `requests` on, out of few, since an engine compiles such a kernel for each
    of them when it starts.
    """
    lanes = 32
    while lanes < requests:
        lanes *= 16
    return lanes
