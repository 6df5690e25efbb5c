"""The controls of notebook 14. Views are plain HTML and images, which need no front end to be right."""

import html
import os

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd

from vqkv.errors import DataError
from vqkv.evaluation.recommend import recommend
from vqkv.models.load import BUNDLED, KNOWN_CONFIGS
from vqkv.study import figures
from vqkv.study.explore import views
from vqkv.study.subject import Subject

WIDE, FITTING, ROW = (
    ipywidgets.Layout(**sizes)
    for sizes in ({"width": "98%"}, {"max_width": "100%", "align_self": "flex-start"}, {"width": "20em"})
)
HEADLESS = "Open this page in JupyterLab and run it: controls for model, preset, bits and prompt appear here."


def widgets(**chosen):
    """Controls for the three views, beginning with what is ``chosen`` (the arguments of ``Explorer``), where a front
    end has opened the page; else a line that says so: a page that is merely executed has no one to move them.

    Jupyter's server names the page in ``JPY_SESSION_NAME`` to a kernel that it starts for one; papermill, nbval and
    ``vqkv.study`` do not.
    """
    return Explorer(**chosen).box if _opened() else print(HEADLESS)


def calculator(model: str, context: int, memory_gb: float):
    """Return the recommended rows of ``vqkv.recommend``, under controls where a front end has opened the page."""
    if not _opened():
        return _ways(model, context, 1, memory_gb)
    return ipywidgets.interactive(
        _ways,
        model=ipywidgets.Dropdown(options=list(dict.fromkeys([model, *KNOWN_CONFIGS, *BUNDLED])), value=model),
        context=ipywidgets.SelectionSlider(options=[2**n for n in range(9, 21)], value=context),
        sequences=ipywidgets.IntSlider(value=1, min=1, max=64),
        memory_gb=ipywidgets.FloatSlider(value=memory_gb, min=1, max=192, step=1),
    )


def _ways(model: str, context: int, sequences: int, memory_gb: float) -> pd.DataFrame:
    try:
        table = recommend(model, context, sequences, memory_gb)
    except DataError as error:
        return pd.DataFrame({"": [str(error)]})
    return table[table["recommended"]].drop(columns=["preset", "recommended"]).reset_index(drop=True)


def _opened() -> bool:
    return "JPY_SESSION_NAME" in os.environ and "VQKV_OUT" not in os.environ


class Explorer:
    """``box`` has controls for the subject's model, the preset, its bits, the prompt, and the key that is followed;
    below them the three ``views``. Whatever is moved, all views follow; what cannot be shown is said in
    ``status``. An empty prompt is the held-out text that the page began with."""

    def __init__(
        self,
        preset: str,
        bits: int,
        subject: Subject,
        prompt: str | list,
        new_tokens: int,
        layer: int,
        head: int,
        token: int,
    ):
        self.subject, self.begun, self.new_tokens = subject, prompt, new_tokens
        names = list(dict.fromkeys([subject.name, *BUNDLED]))
        self.model = ipywidgets.Dropdown(options=names, value=subject.name, description="model")
        self.preset = ipywidgets.Dropdown(options=list(views.SYSTEMS), value=preset, description="preset")
        self.bits = ipywidgets.ToggleButtons(
            options=views.BITS, value=bits, description="bits", layout=ROW, style={"button_width": "3em"}
        )
        text = prompt if isinstance(prompt, str) else ""
        self.prompt = ipywidgets.Textarea(value=text, description="prompt", continuous_update=False, layout=WIDE)
        self.prompt.placeholder = "text to be continued; empty: the held-out text above"
        self.layer, self.head, self.token = (
            ipywidgets.BoundedIntText(value=value, min=0, max=value, description=name)
            for name, value in (("layer", layer), ("KV head", head), ("token", token))
        )
        self.status, self.text = ipywidgets.HTML(), ipywidgets.HTML()
        self.vector, self.evr = (ipywidgets.Image(format="png", layout=FITTING) for _ in range(2))
        self.controls = [self.model, self.preset, self.bits, self.prompt, self.layer, self.head, self.token]
        rows = [self.controls[:3], [self.prompt], self.controls[4:]]
        shown = [self.status, self.text, self.vector, self.evr]
        self.box = ipywidgets.VBox([*(ipywidgets.HBox(row) for row in rows), *shown])
        self.busy = False
        for control in self.controls:
            control.observe(self.refresh, "value")
        self.refresh()

    def refresh(self, change=None) -> None:
        """Show what the controls say."""
        if self.busy:  # a limit that moves may move a value
            return
        self.busy, self.status.value = True, "computing ..."
        try:
            self.status.value = self._show()
        except (ValueError, RuntimeError) as error:
            self.status.value = f"<b>{html.escape(str(error))}</b>"
        finally:
            self.busy = False

    def _show(self) -> str:
        """Compute and draw all views; returns what calibration warns of."""
        subject = self.subject.changed(name=self.model.value)
        system = {"preset": self.preset.value, "bits": self.bits.value, "subject": subject}
        prompt = {"prompt": self.prompt.value or self.begun}
        text = views.continuation(**system, **prompt, new_tokens=self.new_tokens)
        compressor, warned = views.fitted(**system)
        shapes, length = compressor.model["shapes"], views.prompt_tokens(subject, **prompt).shape[1]
        self.layer.max = len(shapes) - 1
        self.head.max, self.token.max = shapes[self.layer.value][0] - 1, length - length % compressor.tokens_per_row - 1
        place = {"layer": self.layer.value, "head": self.head.value, "token": self.token.value}
        self.vector.value = _png(figures.vector_stages(views.stages(**system, **prompt, **place)))
        self.evr.value = _png(figures.explained_by_layer(views.explained(**system)))
        self.text.value = figures.coloured_text(text)
        return html.escape(warned)


def _png(fig) -> bytes:
    plt.close(fig)
    return figures.render(fig, "png")
