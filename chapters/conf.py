"""Sphinx configuration of the book as a web site: `sphinx-build -W --keep-going -b html chapters _site`."""

project = "LLM Inference Engine from Scratch"
author = ""
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
nb_execution_mode = "off"
myst_enable_extensions = [
    "alert",
    "dollarmath",
    "amsmath",
    "colon_fence",
    "deflist",
    "attrs_inline",
    "attrs_block",
]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]
html_theme = "sphinx_book_theme"
html_theme_options = {"navbar_persistent": []}
html_static_path = ["_static"]
mathjax_path = "mathjax/tex-chtml.js"
