"""SmolLM2-135M completes prompts of ten tasks, a client each: perplexity with LoRA, with FedMeZO, and of clients alone.

``python -m benchmarks.completions FOLDER OUT`` reads the task files of ``yizhongw/self-instruct``
(``data/finetuning/t0_train_50k/data_per_template``) from the folder. Rates are chosen on examples of their own. The
runs, with their reports and completions, stay in OUT, and what is there already is not run again, or goes on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import show
from headstart.core.files import write_text
from headstart.runner import run

# Tasks of ten data sets whose prompts are short; of each, the first examples.
TASKS = {
    "CommonGen": "common_gen_topics_from_the_sentence",
    "CommonsenseQA": "commonsense_qa_question_answering",
    "DBpedia": "dbpedia_14_given_a_list_of_category_what_does_the_title_belong_to",
    "Gigaword": "gigaword_TLDR",
    "MRPC": "glue_mrpc_generate_sentence",
    "PAWS": "paws_labeled_final_paraphrase_task",
    "QQP": "glue_qqp_duplicate_or_not",
    "Rotten Tomatoes": "rotten_tomatoes_Reviewer_Opinion_bad_good_choices",
    "SciQ": "sciq_Direct_Question_Closed_Book_",
    "Social IQa": "social_i_qa_Generate_answer",
}
# The rate is chosen on examples that are in no other split.
SPLITS = {"train": 32, "choice": 12, "test": 24}
LORA: dict[str, Any] = {
    "train": "lora", "blocks": 1, "targets": "all-linear", "optimiser": "adamw", "batch_size": 8, "rounds": 6,
    "evaluate_every": 3,
}  # fmt: skip
STAGES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "FedAvg, LoRA in the last block": ({"method": "fedavg"} | LORA, (1e-3, 4e-3)),
    "local only, the same LoRA": ({"method": "local-only"} | LORA, (1e-3, 4e-3)),
    "FedMeZO, the last norm": (
        {
            "method": "fedmezo", "train": "norms", "blocks": 0, "epsilon": 1e-2, "beta2": 0.9, "num_directions": 2,
            "batch_share": 0.25, "schedule": "cosine", "rounds": 80, "evaluate_every": 40,
        },
        (0.03, 0.1),
    ),
}  # fmt: skip


def prepare(folder: Path, out: Path) -> None:
    """Folders of training and test examples, to choose a rate and to test: no prompt twice, tasks in turns."""
    tasks = []
    for task, name in TASKS.items():
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
        examples = {line["prompt"].strip(): line["completion"].removesuffix("<|endoftext|>").strip() for line in lines}
        tasks.append([_chat(task, prompt, text) for prompt, text in examples.items() if text])
    turns = [row for turn in zip(*tasks, strict=False) for row in turn]
    found, start = dict[str, list[str]](), 0
    for split, count in SPLITS.items():
        found[split], start = turns[start : start + len(TASKS) * count], start + len(TASKS) * count
    assert len(turns) >= start
    for tested in ("choice", "test"):
        (out / tested).mkdir(parents=True, exist_ok=True)
        for name, split in (("train", "train"), ("test", tested)):
            write_text(out / tested / f"{name}.jsonl", "\n".join(found[split]) + "\n")


def _chat(task: str, prompt: str, completion: str) -> str:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return json.dumps({"messages": messages, "task": task})


def played(data: Path, out: Path, stage: dict[str, Any], samples: int) -> list[dict[str, Any]]:
    """The metrics of a run, which is left in ``out``."""
    recipe: dict[str, Any] = {
        "name": out.name,
        "data": {"dataset": str(data), "client_column": "task", "partition": {"kind": "natural", "test": "follow"}},
        "model": {"backbone": "smollm2-135m", "task": "generate", "max_tokens": 128, "samples": samples},
        "stages": [stage],
    }
    if not (out / "summary.json").exists():
        run(recipe, out, resume=out.exists(), report=samples > 0)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main(folder: str, out: str) -> None:
    home, shown = Path(out), list[list[object]]()
    prepare(Path(folder), home / "data")
    for name, (stage, rates) in STAGES.items():
        short, tried = name.split(",")[0].replace(" ", "-").lower(), {}
        for rate in rates:
            lines = played(home / "data" / "choice", home / f"{short}-{rate:g}", stage | {"lr": rate}, 0)
            tried[rate] = lines[-1]["local_perplexity_median"]
            print(name, rate, tried[rate], file=sys.stderr, flush=True)
        best = min(tried, key=lambda rate: tried[rate])
        for line in played(home / "data" / "test", home / short, stage | {"lr": best}, 10):
            middle, worst = (f"{line[f'local_perplexity_{kind}']:.2f}" for kind in ("median", "worst_tenth"))
            traffic = f"{(line['bytes_up'] + line['bytes_down']) / 1e6:.2f}"
            pooled = f"{line['perplexity']:.2f}" if "perplexity" in line else ""
            rouge = f"{line['rouge_l']:.3f}" if "rouge_l" in line else ""
            shown.append([name, f"{best:g}", line["round"], pooled, middle, worst, rouge, traffic])
            print(*shown[-1], file=sys.stderr, flush=True)
    columns = ("", "lr", "round", "perplexity", "median client", "worst client", "ROUGE-L of ten", "MB")
    show(f"SmolLM2-135M completes: {len(TASKS)} tasks, a client each, {SPLITS['train']} examples", columns, shown)


if __name__ == "__main__":
    main(*sys.argv[1:])
