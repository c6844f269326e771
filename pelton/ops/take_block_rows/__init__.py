"""take_block_rows(weight, ids, out): out[i] = row ids[i] of a BlockWeight, as numbers.

weight: [R, N] in blocks; ids: [T] int32, in [0, R); out: [T, N] float32, where values are bitwise
those of ggml, or bfloat16, where they are rounded. Token embeddings. What is to come out is what
weights/ggml makes of the blocks as they lie in a file.
"""
