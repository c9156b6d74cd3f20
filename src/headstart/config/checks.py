"""What no single key of a recipe shows: keys that exclude each other, and what a method does not do, in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.config.recipe import PARTITIONS, WITHOUT_CLASSES, Dirichlet, by_classes
from headstart.config.stage import STAGES, ClosedForm


def contradictions(table: Mapping[str, Any]) -> list[str]:
    """What no single key shows: keys that exclude each other, and values with a rule of their own."""
    problems = []
    name, stages = table.get("name", "run"), table.get("stages")
    if isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        problems.append(f"name: {name!r} names the run directory; use letters, digits, dots, dashes and underscores")
    if isinstance(stages, list) and not stages:
        problems.append("stages: empty; add a [[stages]] table with a method")
    tasks = table.get("tasks")
    if "data" not in table and not tasks:
        problems.append("data: missing; add a [data] table, or a [[tasks]] table for each of several tasks")
    if "data" in table and tasks:
        problems.append("tasks: give [data] for one task, or [[tasks]] for several, not both")
    if isinstance(tasks, list) and len(tasks) == 1:
        problems.append("tasks: there is one; give it as [data], or add another")
    if isinstance(table.get("seed"), list):
        problems.append("seed: a list of seeds is a sweep; headstart compare runs them all")
    given = tasks if isinstance(tasks, list) else []
    names = [str(task["name"]) for task in given if isinstance(task, dict) and "name" in task]
    if len(set(names)) < len(names):
        problems.append("tasks: two have the same name")
    tables = {"data": table.get("data"), **{f"tasks.{number}": task for number, task in enumerate(given)}}
    for where, data in tables.items():
        found = [*_unread(data), *_untargeted(data)] if isinstance(data, dict) else []
        problems += [f"{where}.{problem}" for problem in found]
    model = table.get("model")
    problems += _of_model(model, bool(tasks)) if isinstance(model, dict) else []
    problems += _of_prompts(given, str(model.get("task", "classify")) if isinstance(model, dict) else "classify")
    has_body = not isinstance(model, dict) or model.get("backbone") != "features"
    quantised = isinstance(model, dict) and bool(model.get("quantise"))
    data = table.get("data")
    target = data.get("target") if isinstance(data, dict) else None
    task = model.get("task", "classify") if isinstance(model, dict) else "classify"
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        if isinstance(stage, dict) and target in ("regression", "multilabel"):
            problems += [f"stages.{number}.{problem}" for problem in _without_classes(stage, target)]
        if isinstance(stage, dict):
            problems += [f"stages.{number}.{problem}" for problem in _untimed(stage, "clients" in table)]
            problems += [f"stages.{number}{problem}" for problem in _of_stage(number, stage, has_body, bool(tasks))]
            problems += [f"stages.{number}{problem}" for problem in _unrounded(stage)] if quantised else []
            headless = _headless(stage, task, bool(tasks)) if task != "classify" else []
            problems += [f"stages.{number}{problem}" for problem in headless]
    return problems


def _of_model(model: Mapping[str, Any], tasks: bool) -> list[str]:
    """What is wrong with the table of a model as a whole."""
    problems, prompt, chooses = [], model.get("prompt"), model.get("task") == "choose"
    if isinstance(shades := model.get("pixel_range"), list | tuple) and len(set(shades)) == 1:
        problems.append("model.pixel_range: give two values, of black and of white; they are the same")
    if tasks and "label_words" in model:
        problems.append(
            "model.label_words: they are those of one task; with task = 'choose', give a prompt and label_words in "
            "each of the [[tasks]]"
        )
    if model.get("quantise") and "weights" in model:
        problems.append("model.weights: weights of few bits come with the backbone; leave it out, or quantise")
    if model.get("task", "classify") != "classify" and "weights" in model:
        problems.append("model.weights: a language model comes with its own; leave it out, and name its folder instead")
    if model.get("task") == "generate":
        generates = [("prompt", "prompts are in the data"), ("label_words", "there are no classes")]
        problems += [
            f"model.{key}: with task = 'generate', {why}; leave it out" for key, why in generates if key in model
        ]
        return problems
    if chooses and tasks:
        return [*problems, *(["model.prompt: with several tasks, give each its own"] if "prompt" in model else [])]
    if chooses and not {"prompt", "label_words"} <= model.keys():
        problems.append("model.task: to choose, a model needs a prompt, and label_words to choose from; give both")
    elif ("prompt" in model) < ("label_words" in model) or ("{mask}" in str(prompt)) > ("label_words" in model):
        problems.append("model: prompt and label_words belong together; give both or neither")
    if isinstance(prompt, str) and chooses and (prompt.count("{mask}") > 1 or "{text}" not in prompt):
        problems.append("model.prompt: write {text} where the text goes, and {mask} at most once")
    if isinstance(prompt, str) and "label_words" not in model and "{text}" not in prompt:
        problems.append("model.prompt: write {text} where the text goes")
    if isinstance(prompt, str) and not chooses and "label_words" in model and prompt.count("{mask}") != 1:
        problems.append(
            "model.prompt: write {mask} once, and {text} where the text goes; for words that follow the prompt, set "
            "task = 'choose'"
        )
    return problems


def _of_prompts(tasks: Sequence[Any], how: str) -> list[str]:
    """What is wrong with the prompts of several tasks; how: what the model is to do with them."""
    problems = []
    for number, task in enumerate(tasks):
        given = {"prompt", "label_words"} & task.keys() if isinstance(task, dict) else set[str]()
        prompt = task.get("prompt") if isinstance(task, dict) else None
        masks = prompt.count("{mask}") if isinstance(prompt, str) else 0
        if given and how == "generate":
            problems.append(
                f"tasks.{number}: prompts are in the data, and there are no classes; leave {min(given)} out"
            )
        elif ("label_words" in given or masks) and how == "classify":
            problems.append(
                f"tasks.{number}: words to choose from are for model.task = 'choose'; set it, or leave them"
            )
        elif how == "choose" and len(given) < 2:
            problems.append(f"tasks.{number}: to choose, a task needs a prompt, and label_words to choose from")
        elif isinstance(prompt, str) and (masks > 1 or "{text}" not in prompt):
            problems.append(f"tasks.{number}.prompt: write {{text}} where the text goes, and {{mask}} at most once")
    return problems


def _headless(stage: Mapping[str, Any], task: Any, tasks: bool) -> list[str]:
    """What a stage asks of a head, where the model answers in words; problems begin with the key they are about."""
    problems, kind = [], STAGES.get(str(stage.get("method")))
    key = "update" if stage.get("method") == "personalise" else "train"
    if stage.get(key) == "head":
        problems.append(f".{key}: a model that answers in words has no head to train; use 'lora', 'norms' or 'all'")
    if stage.get("head_init", "previous") != "previous" or stage.get("head") == "mlp":
        problems.append(": a model that answers in words has its own head; leave head_init and head out")
    if kind and kind.trains and "personal" == kind.classifier != kind.representation:
        problems.append(f".method: {stage['method']} gives clients heads of their own, and there are none; use fedavg")
    problems += [
        f".{key}: a model that answers in words has its own head; leave {key} out"
        for key in ("compute", *(["without_head"] if task == "generate" else []))
        if stage.get(key)
    ]
    if kind and task == "generate" and not kind.trains:
        problems.append(f".method: {stage['method']} computes a head, and a model that generates has none; use fedavg")
    elif kind and tasks and not kind.trains:
        problems.append(
            f".method: {stage['method']} computes heads on features of one length, and words are each task's own; "
            "leave model.task and label_words out, for heads on the states that the prompts end in"
        )
    return problems


def _unrounded(stage: Mapping[str, Any]) -> list[str]:
    """What would change weights of few bits, which stay as they are; problems begin with the key they are about."""
    kind, (key, train) = STAGES.get(str(stage.get("method"))), _trained(stage)
    if train in ("body", "all", "norms"):
        return [f".{key}: a backbone that model.quantise rounds stays frozen; use 'lora', another module, or 'head'"]
    if kind and (kind.phased or kind.folds):
        return [f".method: {stage['method']} changes weights that model.quantise rounds; use fedavg or flexlora"]
    return []


def _of_stage(number: int, stage: dict[str, Any], has_body: bool, tasks: bool) -> list[str]:
    """What is wrong with a stage as a whole; problems begin with the key they are about."""
    problems, kind, start = [], STAGES.get(str(stage.get("method"))), stage.get("start")
    if isinstance(start, int) and start >= number:
        problems.append(f".start: {start} is not an earlier stage; the first stage has number 0")
    key, train = _trained(stage)
    if train in ("body", "all") and not has_body and not stage.get("compute"):
        problems.append(f".{key}: the data are features, there is no backbone to train; use 'head'")
    if kind is not None:
        problems += _unlike(stage, kind, train, tasks)
    for one, other in (("clients_per_round", "participation"), ("local_epochs", "local_steps")):
        if {one, other} <= stage.keys():
            problems.append(f": set {one} or {other}, not both")
    if stage.get("head") == "mlp" and stage.get("head_init") == "zeros":
        problems.append(".head_init: an MLP of zeros has no gradient; use 'random'")
    if kind and "combine" in kind.model_fields:
        values = {name: field.default for name, field in kind.model_fields.items()} | stage
        problems += [f".{problem}" for problem in _unprotected(values, kind, tasks)]
    if stage.get("secure") and kind and "secure" in kind.model_fields:
        problems += [f".{problem}" for problem in _unsummed(stage, kind, tasks)]
    if kind and issubclass(kind, ClosedForm):
        problems += [f".{problem}" for problem in (*_unhidden(stage, tasks), *_unscattered(stage))]
    if kind and "privacy" in kind.model_fields and _noise(stage) == "shared":
        problems += [f".privacy.noise: {problem}" for problem in _unshared(stage, kind, tasks)]
    return problems


def _trained(stage: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that says what a stage trains, and what it says."""
    kind, key = STAGES.get(str(stage.get("method"))), "update" if stage.get("method") == "personalise" else "train"
    return key, stage.get(key, kind.model_fields[key].default if kind and key in kind.model_fields else None)


def _unread(data: Mapping[str, Any]) -> list[str]:
    """Columns that the partition of a table of data does not read."""
    problems, how = [], data.get("partition", {"kind": Dirichlet().kind})
    kind = how.get("kind") if isinstance(how, Mapping) else None
    for column, reader in (("client_column", "natural"), ("domain_column", "domains")):
        if data.get(column) is not None and kind in PARTITIONS and kind != reader:
            problems.append(
                f"{column}: {data[column]!r} is read with partition.kind = {reader!r} only, and the kind is {kind!r}; "
                f"write partition = {{kind = {reader!r}}}, or leave {column} out"
            )
    return problems


def _untargeted(data: Mapping[str, Any]) -> list[str]:
    """What does not go with the targets of a table of data."""
    target, how, classes = data.get("target"), data.get("partition"), data.get("classes")
    kind = how.get("kind") if isinstance(how, Mapping) else Dirichlet().kind
    if target in ("regression", "multilabel"):
        return [f"partition.{by_classes(str(kind))}"] if kind in PARTITIONS and kind not in WITHOUT_CLASSES else []
    if isinstance(classes, list | tuple) and len(classes) == 1:
        return ["classes: there is one; a classifier needs two classes"]
    return []


def _without_classes(stage: Mapping[str, Any], target: str) -> list[str]:
    """What a stage does not do with targets that are no classes."""
    problems, kind, privacy = [], STAGES.get(str(stage.get("method"))), stage.get("privacy")
    if kind is not None and not kind.any_target:
        problems.append(f"method: {stage['method']} learns classes, and data.target is {target!r}; use fed3r")
    if isinstance(privacy, Mapping) and "test_epsilon" in privacy:
        problems.append("privacy.test_epsilon: errors have no largest value for noise to hide; test on the server")
    return problems


def _unlike(stage: Mapping[str, Any], kind: type[Any], train: Any, tasks: bool) -> list[str]:
    """What a method does not do, by what it says of itself; problems begin with the key they are about."""
    method, problems = stage["method"], []
    body, head = kind.representation, kind.classifier
    personal = "personal" in (body, head, kind.lora_b)
    if head == "frozen" and train == "all":
        problems.append(f".train: {method}'s head stays as it is; use 'body'")
    if head == "frozen" and train == "head" and stage.get("head") != "mlp":
        problems.append(
            f".train: {method} trains what is below the head; with 'head' alone, set head to 'mlp', whose hidden "
            "layers are what is below"
        )
    if "personal" in (body, head) and body != head and train == "body":
        problems.append(f".train: {method} trains a head too; use 'all'")
    if kind.pooled and {"clients_per_round", "participation"} & stage.keys():
        problems.append(f": {method} has no clients to sample from")
    if stage.get("share") and (tasks or not kind.communicates or personal):
        problems.append(".share: a server that trains on a share is for one task and one model")
    elif stage.get("share") and stage.get("share_train") == "body" and train == "head":
        problems.append(".share_train: no backbone is trained; use 'all'")
    if stage.get("keep") == "best" and (personal or kind.twin):
        problems.append(".keep: personal models are those of the last round; use 'last'")
    if stage.get("keep") == "best" and kind.phased:
        problems.append(f".keep: {method}'s first rounds train other parameters; use 'last'")
    if stage.get("patience") and kind.phased:
        problems.append(f".patience: {method}'s first rounds train other parameters, and it has to reach the last ones")
    if stage.get("momentum") and kind.plain_sgd:
        problems.append(f".momentum: {method} is defined for plain local SGD; leave it 0")
    both = kind.phased or kind.lora_b or kind.products
    if stage.get("freeze_a") and (train != "lora" or both):
        problems.append(
            f".freeze_a: {f'the factors of {method} both change' if both else 'A is a factor of a lora'}; "
            f"leave it out{'' if both else ', or set train to lora'}"
        )
    ranks, rank = stage.get("ranks"), stage.get("rank", 8)
    more = [each for each in ranks if isinstance(each, int)] if isinstance(ranks, list | tuple) else []
    if isinstance(rank, int) and max(more, default=0) > rank:
        problems.append(f".ranks: {max(more)} is more than the server's {rank}; set rank to it, or more")
    if train == "prefix":
        whole = [key for key in ("blocks", "checkpoint_gradients") if stage.get(key)]
        problems += [f".{key}: a prefix is in the cache of all blocks at once; leave it out" for key in whole]
    if stage.get("batch_share") is not None and stage.get("batch_size", "full") != "full":
        problems.append(": set batch_share or batch_size, not both")
    if stage.get("probe_rounds") and "probe_rounds" in kind.model_fields:
        problems += [f".{problem}" for problem in _unprobed(stage)]
    if stage.get("optimiser") == "adamw" and (kind.plain_sgd or kind.sgd_only):
        problems.append(f".optimiser: {method} is defined for local SGD; use 'sgd'")
    elif stage.get("optimiser") == "adamw" and stage.get("momentum"):
        problems.append(".momentum: adamw has its own; leave it out")
    return problems


def _unprobed(stage: Mapping[str, Any]) -> list[str]:
    """What does not go with a rate that is measured."""
    problems, rounds = [], stage.get("rounds", 100)
    if "lr" not in stage:
        problems.append("lr: with probe_rounds it is a share of the rate that is measured; give it, such as 0.3")
    if stage.get("beta2") is not None:
        problems.append("beta2: it makes the rate independent of the slopes, and probe_rounds measures it; use one")
    if isinstance(rounds, int) and rounds <= stage["probe_rounds"]:
        problems.append(f"probe_rounds: all of the {rounds} rounds would measure and none would step; use fewer")
    return problems


def _unsummed(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why the server of a stage cannot do with sums over clients."""
    problems, method = [], stage["method"]
    if not kind.communicates:
        problems.append(f"secure: with {method} nothing travels; leave it out")
    if method == "fedcof" and stage.get("covariance", "estimated") == "estimated" and "secure_group" not in stage:
        problems.append(
            "secure: fedcof needs the means of several clients for each class, which one sum over all hides; set "
            "secure_group, and each group counts as one client, or use fedncm or fed3r"
        )
    if stage.get("means_per_client", 1) != 1:
        problems.append("means_per_client: secure aggregation adds a client's parts together; use 1")
    if stage.get("combine", "mean") != "mean":
        problems.append(
            f"combine: {stage['combine']} looks at each client's update, which secure aggregation hides; use 'mean'"
        )
    if stage.get("compress"):
        problems.append("compress: with secure aggregation, masked values are 8 bytes whatever they were; leave it out")
    share = stage.get("secure_threshold", 1.0)
    if isinstance(share, float) and 0 < share <= 2 / 3:
        problems.append(
            f"secure_threshold: {share:g} is too low; a server that lies about who has dropped out could open one "
            "client's values unless more than two thirds have to stay: use 0.67 or more; four clients are the fewest "
            "that tolerate one absence"
        )
    if tasks and "hide_task" in kind.model_fields and not stage.get("hide_task"):
        problems.append("hide_task: sums over clients of several tasks need messages of one shape; set it to true")
    return problems


def _unhidden(stage: Mapping[str, Any], tasks: bool) -> list[str]:
    """Why a closed form cannot hide single examples, blur its counts, or keep the statistics of clients, as asked."""
    problems = []
    estimated = stage.get("covariance", "estimated") == "estimated"
    on_total = _noise(stage) in ("server", "shared")
    some = "clients_per_round" in stage or stage.get("participation", 1) != 1
    if on_total and some and not (stage["method"] == "fedcof" and estimated):
        problems.append(
            "privacy.noise: noise is added to a total once, and the heads of two rounds would differ by exact sums; "
            "sample all clients in one round (leave out clients_per_round and participation), or use 'client'"
        )
    if "privacy" in stage and stage.get("means_per_client", 1) != 1:
        problems.append("means_per_client: one example changes how all of its class is split; with privacy, use 1")
    if stage.get("keep_statistics"):
        hidden = stage.get("secure") or "privacy" in stage
        reasons = {
            "what single clients send is hidden, and cannot be kept or taken out again": hidden,
            "with several centres every client would have to participate again": stage.get("centres", 1) != 1,
            "the temperature would have to be fitted again; set it to a number": isinstance(
                stage.get("temperature"), str
            ),
            "it is for one task; give [data] instead of [[tasks]]": tasks,
        }
        problems += [f"keep_statistics: {why}; leave it out" for why, holds in reasons.items() if holds]
    if "privacy" in stage and stage.get("head") == "lda":
        problems.append("head: discriminants depend on the length of features, which privacy shortens; use 'ridge'")
    if stage.get("prior") == "uniform" and stage.get("head") != "lda":
        problems.append("prior: only head = 'lda' has one; set that, or leave prior out")
    if "privacy" in stage and stage.get("temperature") == "auto":
        problems.append(
            "temperature: losses of training examples would be sent without noise; with privacy, use 'validation', on "
            "the server's own data, or a number"
        )
    if "privacy" in stage and "count_noise" in stage:
        problems.append("count_noise: privacy puts noise on the counts already; set one of the two")
    if "count_noise" in stage and not estimated:
        problems.append("count_noise: second moments do not fit noisy counts; use covariance = 'estimated'")
    if "count_noise" in stage and stage.get("within", "auto") in ("trace", "diagonal"):
        problems.append("count_noise: second moments do not fit noisy counts; use within = 'estimated'")
    return problems


def _unscattered(stage: Mapping[str, Any]) -> list[str]:
    """Why clients of FedCOF cannot send what they are asked to of their scatter."""
    problems = []
    within, rank = stage.get("within", "auto"), stage.get("rank", 0)
    if stage.get("covariance", "estimated") != "estimated":
        given = [key for key, other in (("within", within != "auto"), ("rank", rank)) if other]
        return [f"{key}: covariance = {stage['covariance']!r} is exact already; leave {key} out" for key in given]
    if rank and within == "estimated":
        problems.append("rank: directions are sent beside a trace or a diagonal; use within = 'auto', or rank = 0")
    if rank and "count_noise" in stage:
        problems.append("rank: noise on counts does not hide directions; use rank = 0")
    return problems


def _noise(stage: Mapping[str, Any]) -> str | None:
    """Who adds the noise of a stage; None where there is none."""
    privacy = stage.get("privacy")
    return str(privacy.get("noise", "server")) if isinstance(privacy, Mapping) else None


def _unshared(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why clients cannot share the noise of a stage."""
    problems = []
    if not stage.get("secure"):
        problems.append("clients share the noise of secure aggregation; set secure = true, or use 'client'")
    if stage["method"] == "fedcof" and stage.get("covariance", "estimated") == "estimated":
        problems.append("fedcof needs every client's means, which have noise of their own; use 'client' or 'server'")
    if tasks:
        problems.append("clients share the noise of one task; give [data] instead of [[tasks]], or use 'server'")
    if getattr(kind, "phased", False):
        problems.append(f"{stage['method']} sends other values in its first rounds than in its last; use 'server'")
    return problems


def _untimed(stage: Mapping[str, Any], timed: bool) -> list[str]:
    """Why the first clients of a round, or of all, cannot be the ones that count."""
    kind, problems = STAGES.get(str(stage.get("method"))), list[str]()
    asked = [key for key in ("over_selection", "buffer") if stage.get(key) and kind and key in kind.model_fields]
    for key in asked:
        if not timed:
            problems.append(f"{key}: who is first depends on how fast clients are; add a [clients] table")
        if kind and (kind.pooled or not kind.communicates):
            problems.append(f"{key}: with {stage['method']} nothing travels; leave it out")
        if stage.get("secure"):
            problems.append(f"{key}: secure aggregation needs clients that are known before; leave one of the two out")
        if stage.get("privacy") is not None:
            problems.append(
                f"{key}: privacy is accounted for where chance alone draws clients; leave one of the two out"
            )
    if len(asked) == 2:
        problems.append("over_selection: asynchronous clients are replaced as soon as they have replied; leave it out")
    if kind and "buffer" in asked:
        others = [block for block in (*kind.sends, *kind.numbers) if block != "update"]
        reasons = {
            f"sends {(others or [''])[0]!r}, too, which is of its own round": others,
            "adds up the updates of all rounds, each as it was sent": kind.accumulates and not others,
            "multiplies the factors of each client": kind.products,
            "sends other values in its first rounds than in its last": kind.phased,
        }
        problems += [f"buffer: {stage['method']} {why}; use fedavg" for why, holds in reasons.items() if holds]
    return problems


def _unfed(stage: Mapping[str, Any], kind: type[Any]) -> list[str]:
    """Why a client cannot add what was left out of an update to its next one."""
    reasons = {
        "adds what was left out of an update to the next, and privacy's noise is for each by itself": stage["privacy"],
        f"makes sums right, and combine = {stage['combine']!r} is none": stage["combine"] != "mean",
        f"adds rounds up, and {stage['method']} sends other values in its first rounds than in its last": kind.phased,
        f"adds rounds up, and {stage['method']} multiplies the factors of each": kind.products,
    }
    return [f"{why}; use 'int8' or leave it out" for why, holds in reasons.items() if holds]


def _unprotected(stage: Mapping[str, Any], kind: type[Any], tasks: bool) -> list[str]:
    """Why a training stage, given with its defaults, cannot withstand or hide single clients as it is asked to.

    Robust means, largest norms and noise are for the block `update`: what else a method sends is not covered.
    """
    method, problems, privacy = stage["method"], [], stage["privacy"]
    robust = {"combine": stage["combine"] != "mean", "max_norm": stage["max_norm"] is not None}
    others = [block for block in (*kind.sends, *kind.numbers) if block != "update"]
    given = {**robust, "privacy": privacy is not None, "compress": stage["compress"] is not None}
    for key in [key for key, asked in given.items() if asked]:
        if not kind.communicates:
            problems.append(f"{key}: with {method} no update travels that this could apply to; leave it out")
        elif others and key != "compress":
            verb = "hides" if key == "privacy" else "limits"
            problems.append(f"{key}: {method} sends {others[0]!r}, too, and nothing {verb} that; use another method")
    if kind.products:
        asked = [key for key in ("combine", "max_norm", "privacy") if given[key]]
        problems += [f"{key}: {method} also adds up the products of clients' factors; use fedavg" for key in asked]
    if robust["combine"] and "update" in kind.accumulates.values():
        problems.append(f"combine: what {method}'s clients accumulate adds up to the mean of the updates; use 'mean'")
    if robust["combine"] and stage["hide_task"]:
        problems.append("combine: with hide_task the server needs no more than sums; use 'mean'")
    if stage["compress"] in ("top-k", "sign") and kind.communicates:
        problems += [f"compress: {stage['compress']!r} {why}" for why in _unfed(stage, kind)]
    if privacy is None or not kind.communicates:
        return problems
    if "update" in kind.accumulates.values():
        problems.append(
            f"privacy: {method}'s server adds up the updates of all rounds, and with them their noise; use another "
            "method"
        )
    if kind.twin or "personal" in (kind.representation, kind.classifier, kind.lora_b):
        problems.append(f"privacy: {method} leaves a model with each client that nothing hides; use another method")
    if robust["combine"]:
        problems.append("combine: privacy hides a client in a sum; use 'mean'")
    if stage["weighting"] != "uniform":
        problems.append("weighting: with privacy every client counts alike; use 'uniform'")
    if stage["share"]:
        problems.append("share: with privacy the server cannot hold examples of the clients; leave it 0")
    if stage["sampling"] == "tasks":
        problems.append("sampling: privacy is accounted for where all clients are drawn alike; use 'clients'")
    if tasks and isinstance(privacy, Mapping) and privacy.get("noise") == "client":
        problems.append("privacy.noise: with several tasks, what a client sends shows which is its own; use 'server'")
    return problems
