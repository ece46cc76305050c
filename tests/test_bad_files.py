"""The oracle's 26 bad files, each refused with one line that names the culprit, before any kernel could run."""

import pytest

from tests.finite import check_finite
from tmla.config import open_checked
from tmla.errors import GGUFError

# file -> what its message has to name
CULPRITS = {
    "bad_truncated_data": ["blk.2.attn_q.weight", "ends at byte 153504"],
    "bad_truncated_header": ["ends at byte 3000"],
    "bad_kv_b_q4_0": ["blk.1.attn_kv_b.weight", "Q4_0", "Q8_0"],
    "bad_kv_b_f16": ["blk.1.attn_kv_b.weight", "F16", "Q8_0"],
    "bad_kv_b_shape": ["blk.1.attn_kv_b.weight", "[96, 64]", "[128, 64]"],
    "bad_missing_tensor": ["blk.2.attn_kv_a_norm.weight", "missing"],
    "bad_missing_key": ["deepseek2.attention.kv_lora_rank", "missing"],
    "bad_kv_lora_48": ["kv_lora_rank", "48", "multiple of 32"],
    "bad_kv_lora_mismatch": ["kv_lora_rank", "48"],
    "bad_nan_scales": ["blk.1.attn_output.weight", "row 1, block 1", "nan"],
    "bad_inf_scales": ["blk.1.attn_output.weight", "row 1, block 1", "inf"],
    "bad_nan_norm": ["output_norm.weight", "value 5", "nan"],
    "bad_unknown_arch": ["general.architecture", "llama", "deepseek2, minicpm3, plm"],
    "bad_wrong_magic": ["GGML", "GGUF"],
    "bad_version_1": ["version 1"],
    "bad_rope_odd": ["rope.dimension_count", "31", "even"],
    "bad_rope_mismatch": ["blk.0.attn_kv_a_mqa.weight", "[96, 64]", "[94, 64]"],
    "bad_huge_tensor_count": ["1152921504606846976 tensors"],
    "bad_huge_string": ["4611686018427387904"],
    "bad_huge_dim": ["token_embd.weight", "1099511627776"],
    "bad_offset_outside": ["output_norm.weight", "213504"],
    "bad_offset_misaligned": ["output_norm.weight", "alignment 32"],
    "bad_duplicate_tensor": ["blk.1.attn_norm.weight", "twice"],
    "bad_experts_used_5": ["expert_used_count", "5", "4"],
    "bad_zero_heads": ["attention.head_count", "0"],
    "bad_empty": ["empty"],
}
FOUND_IN_DATA = {"bad_nan_scales", "bad_inf_scales", "bad_nan_norm"}


def test_every_bad_file_is_in_the_table(oracle):
    assert {path.stem for path in (oracle / "bad").glob("*.gguf")} == set(CULPRITS)


def open_and_look(path, found_in_data):
    gf, cfg = open_checked(path)
    with gf:
        assert found_in_data, "the header alone shows what is wrong"
        check_finite(gf, cfg)


@pytest.mark.parametrize("name", CULPRITS)
def test_refused_in_one_line(oracle, name):
    with pytest.raises(GGUFError) as error:
        open_and_look(oracle / "bad" / f"{name}.gguf", name in FOUND_IN_DATA)
    message = str(error.value)
    assert message.isprintable()
    assert message.startswith(f"{name}.gguf: ")
    assert len(message) < 400
    for part in CULPRITS[name]:
        assert part in message


def test_the_good_original_passes(oracle):
    gf, cfg = open_checked(oracle / "dsv2_mini.gguf")
    with gf:
        check_finite(gf, cfg)
