"""Kernels for Hopper (sm_90a), written in the tile vocabulary of `gluon.tile`."""
