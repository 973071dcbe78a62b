"""Kernels: tensors in, tensors out, callable without the dispatcher."""
