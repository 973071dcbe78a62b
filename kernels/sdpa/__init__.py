"""Attention on a CPU over chunks of gathered keys, with torch's fused kernel and log-sum-exp merging.

``tiles`` cuts rows, ``step`` prepares a batch once for all layers, ``run`` computes one layer, ``keys`` reads its keys.
"""
