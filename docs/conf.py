"""Sphinx: `sphinx-build -W docs site` after `pip install -e ".[docs]"`."""

project = "solrl"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
exclude_patterns = ["_build"]
