"""Kernels for a CPU in plain C++ (`native/`), called through ctypes."""
