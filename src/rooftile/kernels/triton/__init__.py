"""Portable GPU kernels in Triton; its interpreter also runs them on a CPU."""
