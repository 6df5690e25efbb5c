"""The controls of notebook 14: a chat, and the key that is followed."""

import html
import os

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd

from vqkv.errors import DataError
from vqkv.study import figures, steering
from vqkv.study.explore import views
from vqkv.study.subject import Subject

HEADLESS = "Open this page in JupyterLab and run it: a chat and controls appear here."
WIDE = ipywidgets.Layout(width="98%")


def chat(systems: list, subject: Subject, max_new_tokens: int):
    """Make a chat with ``systems`` side by side where a front end has opened the page; else print a line that says so.

    Jupyter's server names the page in ``JPY_SESSION_NAME``; papermill and ``vqkv.study`` do not.
    """
    return Chat(systems, subject, max_new_tokens).box if _opened() else print(HEADLESS)


def follow(systems: list, subject: Subject, turn: str, layer: int, head: int, token: int):
    """The figures of one key of ``turn``, under controls that choose another; None where no front end is."""
    if not _opened():
        return None

    def show(turn: str, layer: int, head: int, token: int) -> None:
        try:
            figures.vector_stages(views.stages(systems, subject, turn, layer, head, token))
            plt.show()
        except DataError as error:
            print(error)

    numbers = {"layer": layer, "head": head, "token": token}
    moved = {name: ipywidgets.BoundedIntText(value, 0, 10**6, description=name) for name, value in numbers.items()}
    said = ipywidgets.Textarea(turn, description="first turn", continuous_update=False, layout=WIDE)
    return ipywidgets.interactive(show, turn=said, **moved)


def _opened() -> bool:
    return "JPY_SESSION_NAME" in os.environ and not steering.current.out


class Chat:
    """``box`` has a line to type in, the two systems, and what they answer; another system begins a conversation."""

    def __init__(self, systems: list, subject: Subject, max_new_tokens: int):
        self.subject, self.max_new_tokens = subject, max_new_tokens
        self.systems = [ipywidgets.Dropdown(options=views.SYSTEMS, value=system) for system in systems]
        self.prompt = ipywidgets.Text(placeholder="say something, then Enter", continuous_update=False, layout=WIDE)
        self.status, self.text = ipywidgets.HTML(), ipywidgets.HTML()
        self.box = ipywidgets.VBox([ipywidgets.HBox(self.systems), self.prompt, self.status, self.text])
        self.prompt.observe(self.say, "value")
        for control in self.systems:
            control.observe(self.begin, "value")
        self.begin()

    def begin(self, change=None) -> None:
        """Forget what was said."""
        self.talks: list[views.Dialogue] = []
        self.rows: list[dict] = []
        self.text.value = ""

    def say(self, change=None) -> None:
        """Have each system answer the prompt, and empty it."""
        said = self.prompt.value.strip()
        if not said:
            return
        self.status.value = "computing ..."
        try:
            self.talks = self.talks or [views.Dialogue(control.value, self.subject) for control in self.systems]
            for talk in self.talks:
                self.rows += talk.turn(said, self.max_new_tokens)
                self.text.value = figures.coloured_chat(pd.DataFrame(self.rows))
            self.status.value = self.prompt.value = ""
        except (ValueError, RuntimeError) as error:
            self.status.value = f"<b>{html.escape(str(error))}</b>"
