"""Small data sets in the layout of the real ones, in folders of their names: lm_eval's own task definitions find them
when they run in the folder that holds them."""

import random
from pathlib import Path

import yaml
from datasets import Dataset

WORDS = ["red", "green", "large", "quick", "slow", "river", "stone", "cloud", "engine", "garden", "winter", "letter"]


def write(folder: Path, docs: int = 30) -> None:
    """Every data set of the suites that lm_eval would fetch."""
    rng = random.Random(0)
    for (path, config), splits in _sets(rng, docs).items():
        for split, rows in splits.items():
            target = folder / path / (config or "default") / f"{split}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_json(target)
    for path in {path for path, _ in _sets(rng, docs)}:
        _write_card(folder / path)


def _write_card(folder: Path) -> None:
    """A README that names configurations and splits, as those on the hub."""
    configs = [
        {
            "config_name": config.name,
            "data_files": [{"split": file.stem, "path": f"{config.name}/{file.name}"} for file in config.iterdir()],
        }
        for config in sorted(folder.iterdir())
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def _sets(rng: random.Random, docs: int) -> dict:
    def rows(make):
        return [make(i) for i in range(docs)]

    def sentence(words=8):
        return " ".join(rng.choices(WORDS, k=words))

    def arc(i):
        choices = {"text": [sentence(3) for _ in range(4)], "label": list("ABCD")}
        return {"id": str(i), "question": sentence() + "?", "choices": choices, "answerKey": rng.choice("ABCD")}

    def hellaswag(i):
        about = {"ind": i, "activity_label": "Gardening", "ctx_a": sentence(), "ctx_b": "he", "ctx": sentence()}
        return about | {"endings": [sentence(5) for _ in range(4)], "label": str(rng.randrange(4))}

    def mmlu(i):
        return {"question": sentence() + "?", "choices": [sentence(2) for _ in range(4)], "answer": rng.randrange(4)}

    def truthfulqa(i):
        one = {"choices": [sentence(4) for _ in range(4)], "labels": [1, 0, 0, 0]}
        many = {"choices": [sentence(4) for _ in range(5)], "labels": [1, 1, 0, 0, 0]}
        return {"question": sentence() + "?", "mc1_targets": one, "mc2_targets": many}

    def winogrande(i):
        text = f"{sentence(3)} because _ {sentence(3)}"
        return {"sentence": text, "option1": "river", "option2": "stone", "answer": rng.choice("12")}

    def gsm8k(i):
        a, b = rng.randrange(50), rng.randrange(50)
        return {"question": f"What is {a} and {b} together?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>\n#### {a + b}"}

    return {
        ("allenai/ai2_arc", "ARC-Challenge"): {split: rows(arc) for split in ("train", "validation", "test")},
        ("Rowan/hellaswag", None): {split: rows(hellaswag) for split in ("train", "validation")},
        ("cais/mmlu", "anatomy"): {split: rows(mmlu) for split in ("dev", "validation", "test")},
        ("truthfulqa/truthful_qa", "multiple_choice"): {"validation": rows(truthfulqa)},
        ("allenai/winogrande", "winogrande_xl"): {split: rows(winogrande) for split in ("train", "validation")},
        ("openai/gsm8k", "main"): {split: rows(gsm8k) for split in ("train", "test")},
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): {
            split: rows(lambda i: {"page": f" = {sentence(2)} = \n\n {sentence(90)} . \n"})
            for split in ("train", "validation", "test")
        },
    }
