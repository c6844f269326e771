"""take_packed_rows(ids, out): out[i] = row ids[i] of a weight, from the copy that products read.

The weight [R, N] is bfloat16 or float32, packed as ops/native_product says; ids: [T] int32, in
[0, R); out: [T, N] of its type. Token embeddings that share their memory with a tied head.
"""
