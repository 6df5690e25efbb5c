"""Attention of new tokens to packed keys and values: softmax(q k^T * scaling) v, without mask, over shares of the
tokens, which their log-sum-exps join (Flash-Decoding)."""
