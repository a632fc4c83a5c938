"""The fake server, which takes text alone where its model file is called `other.gguf`."""

import sys

from weft_testing.fake_backend.__main__ import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    main([*arguments, "--text-only"] if any(word.endswith("other.gguf") for word in arguments) else arguments)
