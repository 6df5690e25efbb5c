"""The controls of notebook 18. Views are plain HTML and images, which need no front end to be right."""

import html

import ipywidgets
import matplotlib.pyplot as plt

from vqkv.models.load import BUNDLED
from vqkv.study import explore, figures
from vqkv.study.experiments.common import subject

WIDE = {"layout": ipywidgets.Layout(width="98%")}


class Explorer:
    """``box`` has controls for the model of ``who``, the preset, its bits, the prompt, and the key that is followed;
    below them the views that ``explore`` makes. Whatever is turned, all views follow; what cannot be shown is said in
    ``status``. An empty prompt is the held-out text that the page began with."""

    def __init__(
        self, preset: str, bits: int, who: dict, prompt: str | list, new_tokens: int, layer: int, head: int, token: int
    ):
        self.who, self.begun, self.new_tokens = who, prompt, new_tokens
        names = list(dict.fromkeys([who["name"], *BUNDLED]))
        self.model = ipywidgets.Dropdown(options=names, value=who["name"], description="model")
        self.preset = ipywidgets.Dropdown(options=list(explore.SYSTEMS), value=preset, description="preset")
        self.bits = ipywidgets.ToggleButtons(
            options=explore.BITS, value=bits, description="bits", style={"button_width": "3em"}
        )
        text = prompt if isinstance(prompt, str) else ""
        self.prompt = ipywidgets.Textarea(value=text, description="prompt", continuous_update=False, **WIDE)
        self.prompt.placeholder = "text to be continued; empty: the held-out text above"
        self.layer, self.head, self.token = (
            ipywidgets.BoundedIntText(value=value, min=0, max=value, description=name)
            for name, value in (("layer", layer), ("KV head", head), ("token", token))
        )
        self.status, self.text = ipywidgets.HTML(), ipywidgets.HTML()
        self.vector, self.evr = ipywidgets.Image(format="png"), ipywidgets.Image(format="png")
        self.controls = [self.model, self.preset, self.bits, self.prompt, self.layer, self.head, self.token]
        rows = [self.controls[:3], [self.prompt], self.controls[4:]]
        views = [self.status, self.text, self.vector, self.evr]
        self.box = ipywidgets.VBox([*(ipywidgets.HBox(row) for row in rows), *views])
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
        who = self.who | {"name": self.model.value}
        system = {"preset": self.preset.value, "bits": self.bits.value, "who": who}
        prompt = self.prompt.value or self.begun
        found, (compressor, warned) = subject(**who), explore.fitted(**system)
        length = explore.prompt_tokens(found, prompt).shape[1]
        shapes = compressor.model["shapes"]
        self.layer.max = len(shapes) - 1
        self.head.max, self.token.max = shapes[self.layer.value][0] - 1, length - length % compressor.tokens_per_row - 1
        place = {"layer": self.layer.value, "head": self.head.value, "token": self.token.value}
        text = explore.continuation(**system, prompt=prompt, new_tokens=self.new_tokens)
        self.text.value = figures.coloured_text(text)
        self.vector.value = _png(figures.vector_stages(explore.stages(**system, prompt=prompt, **place)))
        self.evr.value = _png(figures.explained_by_layer(explore.explained(**system)))
        return html.escape(warned)


def _png(fig) -> bytes:
    plt.close(fig)
    return figures.render(fig, "png")
