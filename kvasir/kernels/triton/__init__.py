"""Triton kernels. Each equals a function of kernels/reference.py or the torch attention backend."""
