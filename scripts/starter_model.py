"""Print where the starter model is, SmolLM2-135M-Instruct as a GGUF file. Kvasir runs it as it is."""

from kvasir.errors import ModelError
from kvasir.models.hub import find_starter_model

if __name__ == "__main__":
    try:
        print(find_starter_model())
    except ModelError as error:
        raise SystemExit(str(error)) from None
