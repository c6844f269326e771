from __future__ import annotations

import ctypes

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import BuildInputsArgs, KVGroupArgs
from pelton.ops.step_tensors import InputTensors, RowTensors, StepArrays


def build_inputs(rows: RowTensors, step: StepArrays, out: InputTensors) -> None:
    groups = (KVGroupArgs * len(rows.block_tables))(
        *(
            KVGroupArgs(
                table=table.data_ptr(),
                batch_table=batch_table.data_ptr(),
                slot_mapping=slot_mapping.data_ptr(),
                table_stride=table.stride(0),
                batch_stride=batch_table.stride(0),
                width=batch_table.shape[1],
                block_size=block_size,
                window=window or 0,
            )
            for table, block_size, window, batch_table, slot_mapping in zip(
                rows.block_tables,
                rows.block_sizes,
                rows.windows,
                out.block_tables,
                out.slot_mappings,
                strict=True,
            )
        )
    )
    args = BuildInputsArgs(
        fields=rows.fields.data_ptr(),
        tokens=rows.tokens.data_ptr(),
        live=step.live.data_ptr(),
        idx_mapping=step.idx_mapping.data_ptr(),
        query_start_loc=step.query_start_loc.data_ptr(),
        cu_num_logits=step.cu_num_logits.data_ptr(),
        input_ids=out.input_ids.data_ptr(),
        positions=out.positions.data_ptr(),
        seq_lens=out.seq_lens.data_ptr(),
        is_padding=out.is_padding.data_ptr(),
        logits_indices=out.logits_indices.data_ptr(),
        logits_slots=out.logits_slots.data_ptr(),
        logits_positions=out.logits_positions.data_ptr(),
        groups=ctypes.addressof(groups),
        fields_stride=rows.fields.stride(0),
        tokens_stride=rows.tokens.stride(0),
        positions_stride=out.positions.stride(0),
        num_fields=rows.fields.shape[1],
        num_rows=len(step.idx_mapping),
        num_tokens=len(out.input_ids),
        num_logits=len(out.logits_indices),
        num_axes=len(out.positions),
        num_groups=len(groups),
    )
    call(loaded().functions.pelton_build_inputs, args, groups)
