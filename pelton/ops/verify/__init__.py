"""verify(step, fields, token_ids, status, out): which drafts stand, and what each row yields.

token_ids, status: [N], drawn for every verification row, each with its own noise. fields: row
state's, for the drafts. out: [B, 1 + K + 2] int32 = token ids, num_sampled, status.
A draft stands where it equals the draw at its place and all drafts before it stand; the row yields
those draws and the one after, so tokens are those of plain decoding whatever the drafts were. A row
without verification rows (mid-prefill, padding) yields 0 tokens. The row's status is that of the
first unsound draw among the kept ones.
"""

from pelton.ops.verify.reference import verify

__all__ = ["KERNELS", "verify"]

KERNELS = {
    "cpu": "pelton.ops.verify.cpu:verify",
    "cuda": "pelton.ops.verify.triton:verify",
}
