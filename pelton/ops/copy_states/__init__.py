"""save_states(commands, copies), load_states(commands, copies): rows' recurrent state to and from
blocks of the KV pools, byte for byte.

commands: [n, COLUMNS + pages] int32: slot, index in its ring, block ids of the checkpoint.
copies: what lies where, per recurrent layer. A save leaves what lies behind a state in its last
page as it was; a load reads no more than the state.
"""

from pelton.ops.copy_states.reference import COLUMNS, StateCopy, load_states, save_states

__all__ = ["COLUMNS", "StateCopy", "load_states", "save_states"]
