from bertsmith.training.run_folder import card_text, facts_block, table_block, usage_block

CARD = """---
library_name: "bertsmith"
tags: ["a: b", "c"]
---

# toy

A toy encoder.

## Training
- 3 steps.
- seed 0.

| split | metric | value |
|---|---|---|
| dev | accuracy | 0.5000 |

## Usage

```python
print(1)
```

Try it first.
"""


def test_a_card_is_blocks_with_blank_lines_between_them():
    rows = [("dev", "accuracy", "0.5000")]
    blocks = [
        facts_block(["3 steps.", "seed 0."], heading="Training"),
        table_block(("split", "metric", "value"), rows),
        usage_block("print(1)"),
    ]
    header = {"library_name": "bertsmith", "tags": ["a: b", "c"]}
    assert card_text("toy", "A toy encoder.", blocks, caveat="Try it first.", header=header) == CARD


def test_a_table_without_rows_keeps_its_head():
    assert table_block(("metric", "value"), []) == ["| metric | value |", "|---|---|"]
