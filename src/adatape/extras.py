"""Maps optional libraries to the package extra that installs them."""

from __future__ import annotations

EXTRA_OF = {
    "tyro": "cli",
    "rich": "cli",
    "pydantic": "cli",
    "jinja2": "cli",
    "sklearn": "train",
    "scipy": "train",
    "tensorboard": "train",
    "webdataset": "train",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "python_multipart": "serve",
    "prometheus_client": "serve",
    "matplotlib": "plot",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "tifffile": "large",
    "imagecodecs": "large",
    "faiss": "retrieval",
}


def how_to_install(module: str | None) -> str | None:
    """A one-line install hint for a missing module; None where no extra contains it."""
    library = (module or "").partition(".")[0]
    extra = EXTRA_OF.get(library)
    return extra and f"{library} is not installed; `pip install 'adatape[{extra}]'` installs it"
