"""Small data sets in the layout of the real ones, in folders of their names: lm_eval's own task definitions find them
when they run in the folder that holds them."""

import random
from pathlib import Path

import yaml
from datasets import Dataset

WORDS = ["red", "green", "large", "quick", "slow", "river", "stone", "cloud", "engine", "garden", "winter", "letter"]
DOCS = 30
SPLITS = {
    "allenai/ai2_arc/ARC-Challenge": ("train", "validation", "test"),
    "Rowan/hellaswag/default": ("train", "validation"),
    "cais/mmlu/anatomy": ("dev", "validation", "test"),
    "truthfulqa/truthful_qa/multiple_choice": ("validation",),
    "allenai/winogrande/winogrande_xl": ("train", "validation"),
    "openai/gsm8k/main": ("train", "test"),
    "EleutherAI/wikitext_document_level/wikitext-2-raw-v1": ("train", "validation", "test"),
}


def write(folder: Path) -> None:
    """Write every data set of the suites that lm_eval would fetch, with a README that names its splits as the hub's."""
    rng = random.Random(0)
    for name, splits in SPLITS.items():
        path, config = name.rsplit("/", 1)
        for split in splits:
            rows = Dataset.from_list([_row(path, i, rng) for i in range(DOCS)])
            (folder / name).mkdir(parents=True, exist_ok=True)
            rows.to_json(folder / name / f"{split}.jsonl")
        files = [{"split": split, "path": f"{config}/{split}.jsonl"} for split in splits]
        card = {"configs": [{"config_name": config, "data_files": files}]}
        (folder / path / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


def _row(path: str, i: int, rng: random.Random) -> dict:
    def sentence(words=8):
        return " ".join(rng.choices(WORDS, k=words))

    a, b = rng.randrange(50), rng.randrange(50)
    answers, labels = [sentence(4) for _ in range(4)], [1, 0, 0, 0]
    about = {"ind": i, "activity_label": "Gardening", "ctx_a": sentence(), "ctx_b": "he", "ctx": sentence()}
    question = {"question": sentence() + "?"}
    return {
        "allenai/ai2_arc": question
        | {"id": str(i), "choices": {"text": answers, "label": list("ABCD")}, "answerKey": rng.choice("ABCD")},
        "Rowan/hellaswag": about | {"endings": answers, "label": str(rng.randrange(4))},
        "cais/mmlu": question | {"choices": answers, "answer": rng.randrange(4)},
        "truthfulqa/truthful_qa": question
        | {f"{kind}_targets": {"choices": answers, "labels": labels} for kind in ("mc1", "mc2")},
        "allenai/winogrande": {"sentence": f"{sentence(3)} because _ {sentence(3)}", "answer": rng.choice("12")}
        | {"option1": "river", "option2": "stone"},
        "openai/gsm8k": {"question": f"What is {a} and {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>\n#### {a + b}"},
        "EleutherAI/wikitext_document_level": {"page": f" = {sentence(2)} = \n\n {sentence(90)} . \n"},
    }[path]
