"""SmolLM2-135M that chooses between words: zero-shot, FedMeZO and FedAvg on LoRA, against rounds and bytes.

On two cores a run takes an hour or two; ``python -m benchmarks.language sst2 fedmezo 0.1`` plays one of them.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from benchmarks.common import SHARED, show
from headstart.config.recipe import Recipe
from headstart.runner import run

TEST = 400
PROMPTS: dict[str, tuple[str, list[str]]] = {
    "sst2": ("Review: {text}\nSentiment:", ["negative", "positive"]),
    "sst5": ("Review: {text}\nSentiment:", ["terrible", "bad", "okay", "good", "great"]),
    "ag_news": ("News: {text}\nTopic:", ["World", "Sports", "Business", "Technology"]),
    "trec": ("{text}\nThe answer is a", ["abbreviation", "entity", "description", "human", "location", "number"]),
    "mnli": ("{text}\nQuestion: {second} Yes, maybe or no?\nAnswer:", ["Yes", "Maybe", "No"]),
}
COMMON = {"train": "lora", "blocks": 8}
STAGES: dict[str, dict[str, Any]] = {
    "fedmezo": COMMON | {"method": "fedmezo", "rounds": 60, "lr": 0.3, "batch_size": 4, "evaluate_every": 15},
    "fedavg": COMMON
    | {"method": "fedavg", "optimiser": "adamw", "rounds": 8, "lr": 1e-3, "batch_size": 8, "evaluate_every": 4},
}


def recipe(task: str, stage: str, alpha: float) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    prompt, words = PROMPTS[task]
    partition = {"kind": "dirichlet", "clients": 10, "alpha": alpha}
    return Recipe.parse(
        {
            "data": {"dataset": task, "train_examples": 400, "test_examples": TEST, "partition": partition},
            "model": {
                "backbone": "smollm2-135m", "task": "choose", "prompt": prompt, "label_words": words, "max_tokens": 96,
            },
            "stages": [STAGES[stage]],
        }
    )  # fmt: skip


def rows(task: str, stage: str, alpha: float) -> list[list[object]]:
    """Of every evaluation: the round, the accuracy with the standard error of the test set, the loss, the bytes."""
    found: list[list[object]] = []

    def note(line: dict[str, Any]) -> None:
        accuracy = line["accuracy"]
        error = math.sqrt(accuracy * (1 - accuracy) / TEST)
        sent = (line["bytes_up"] + line["bytes_down"]) / 1e6
        shown = f"{100 * accuracy:.1f} ± {100 * error:.1f}"
        found.append([task, stage, alpha, line["round"], shown, f"{line['loss']:.4f}", f"{sent:.2f}"])

    run(recipe(task, stage, alpha), on_metrics=note)
    return found


def main(arguments: tuple[str, ...] = ()) -> None:
    task, stage, alpha = (*arguments, *("", "", "")[len(arguments) :])
    found = [
        row
        for each in ([task] if task else PROMPTS)
        for method in ([stage] if stage else STAGES)
        for degree in ([float(alpha)] if alpha else (100.0, 0.1))
        for row in rows(each, method, degree)
    ]
    columns = ("data", "method", "α", "round", "accuracy, %", "loss", "MB")
    show(f"SmolLM2-135M, LoRA in the last 8 blocks, 400 examples, 10 clients, {TEST} tests", columns, found)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
