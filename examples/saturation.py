"""A reward of your own: how colourful the images are. Save it where Python finds it, and name it in the config.

    PYTHONPATH=examples solrl train tiny_flux --reward.name saturation:Saturation --reward.options.target 0.8

A package can offer it under a short name instead, with an entry point in its pyproject.toml:

    [project.entry-points."solrl.rewards"]
    saturation = "saturation:Saturation"
"""


class Saturation:
    """1 where the mean distance of the strongest from the weakest channel is `target`, less elsewhere."""

    name = "saturation"
    range = (0.0, 1.0)
    description = "colourfulness; 1 is as colourful as asked for"

    def __init__(self, target=0.5):
        self.target = target

    def __call__(self, images, prompts):
        """[B, 3, H, W] images in [0, 1] and B prompts -> [B] scores. Raise where something cannot be scored."""
        saturation = (images.amax(1) - images.amin(1)).mean((1, 2))
        return 1 - (saturation - self.target).abs()
