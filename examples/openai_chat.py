"""A streamed chat with the OpenAI client: python examples/openai_chat.py [base URL]."""

import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1] if len(sys.argv) > 1 else 'http://127.0.0.1:8080'}/v1", api_key="unused")
for chunk in client.chat.completions.create(
    model="smollm2-135m", messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
