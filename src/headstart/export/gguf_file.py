"""A tuned language model back into the kind of file that it came from: GGUF, for llama.cpp and what builds on it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headstart.backbones.gguf import smollm2
from headstart.errors import HeadstartError
from headstart.export.model import Model

_FILE = "model.gguf"
# What a file says of its own rounding, which no longer holds.
_ROUNDING = ("general.file_type", "general.quantization_version")


def save_gguf(model: Model, folder: Path) -> str:
    """Write the model, a LoRA in its weights, with everything else that its own file says; the README for it."""
    source = _source(model)
    if not model.speaks or model.cloze or not model.store.backbone:
        raise HeadstartError("--format gguf: such a file holds no head; leave --format out, or choose and generate")
    if model.store.module is not None and model.store.module.kind != "lora":
        raise HeadstartError(f"--format gguf: such a file holds no {model.store.module.kind}; leave --format out")
    weights = _named(source, {name: array for name, array in model.store.arrays().items() if ".lora_" not in name})
    _write(source, folder / _FILE, weights)
    _check(model, folder)
    classes = "" if model.store.generates else "- `classes.json`: the names of the classes\n"
    return (
        f"# {model.recipe.name}\n\n- `{_FILE}`: {model.recipe.model.backbone} as it was tuned, in float32, with the "
        f"vocabulary and the chat template of the file that it came from\n{classes}\n"
        f"```text\nllama-cli -m {_FILE}\nllama-quantize {_FILE} small.gguf Q4_1\n```\n"
    )


def _source(model: Model) -> Path:
    """The file that the backbone of a run was read from."""
    name = model.recipe.model.backbone
    if find_spec("gguf") is None:
        raise HeadstartError("--format gguf needs gguf; pip install 'headstart[language]'")
    if name == "smollm2-135m":
        return smollm2()
    if Path(name).suffix != ".gguf":
        raise HeadstartError(
            f"--format gguf: vocabulary and settings are those of the GGUF file that a model came from, and {name} "
            "came from none; name one as model.backbone, or leave --format out and convert the folder with llama.cpp"
        )
    return Path(name).expanduser()


def _named(source: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights under the names of GGUF; those of rotary positions in its order."""
    import gguf

    fields = gguf.GGUFReader(source).fields
    kind = str(fields["general.architecture"].contents())
    number: Any = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(number, int(fields[f"{kind}.block_count"].contents()))
    heads = int(fields[f"{kind}.attention.head_count"].contents())
    shared = fields.get(f"{kind}.attention.head_count_kv")
    counts = {"attn_q": heads, "attn_k": int(shared.contents()) if shared else heads}
    found = {}
    for name, array in arrays.items():
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if called is None:
            raise HeadstartError(f"--format gguf: {name} has no name there; leave --format out")
        part = called.split(".")[-2]
        found[called] = _interleaved(array, counts[part]) if kind == "llama" and part in counts else array
    return found


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in pairs, as LLaMA's own code turns them, in the place of halves, as `transformers` does."""
    parts = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))


def _write(source: Path, out: Path, weights: dict[str, np.ndarray]) -> None:
    """The file again, with these weights in the place of its own, in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF.") and field.name not in _ROUNDING:
            kind = field.types[0]
            each = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=each)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        if tensor.name in weights:
            writer.add_tensor(tensor.name, np.ascontiguousarray(weights[tensor.name], np.float32))
        else:  # tables that are no weights, such as factors of positions
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(model: Model, folder: Path) -> None:
    """Read it as `transformers` does: it must be the model that was tuned, to the bit."""
    from contextlib import redirect_stderr
    from io import StringIO

    import transformers

    with redirect_stderr(StringIO()):
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, trust_remote_code=False)
    found = {name: tensor.float() for name, tensor in read.state_dict().items()}
    for name, array in model.store.arrays().items():
        if not np.array_equal(found[name].numpy(), array):
            (folder / _FILE).unlink()
            raise HeadstartError(
                f"--format gguf: {name} does not come back from the file as it was; models of this family are written "
                "for transformers, leave --format out"
            )
