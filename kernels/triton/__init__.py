"""Paged attention in Triton for NVIDIA, AMD and Intel GPUs. Callable without the dispatcher: tensors in, tensors out.

Names. Constants known to the compiler are UPPER_CASE; pointers end in ``_ptr``; ``stride_k_page`` is the stride of ``k``
along its pages. Every block carries its shape in a comment, in these letters::

    M   BLOCK_M rows of a Q block: BLOCK_Q query tokens times the GROUP query heads that share one KV head
    N   BLOCK_N keys of a tile
    D   BLOCK_D elements of a key (head size, rounded up to a power of two)
    DV  BLOCK_DV elements of a value

Words. A *tile* is BLOCK_N neighbouring keys of a row, counted from key 0. A *work item* is one part of the keys that one Q
block sees. When a Q block has several items, each writes a partial state (output and LSE) into a *slot*, and ``combine`` merges them.
"""
