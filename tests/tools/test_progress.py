"""Live progress, from metrics files as workers write them."""

import json

from rich.console import Console

from isthmus.tools.progress import LiveProgress, MetricsReader


def step(number: int, loss: float = 2.0) -> str:
    return json.dumps({"event": "step", "step": number, "loss": loss, "tokens": 100 * number, "seconds": number}) + "\n"


def test_progress_reads_what_is_complete_and_begins_anew_when_the_file_is_cut(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    reader = MetricsReader(path)
    assert reader.read() == []
    path.write_text(step(1) + step(2)[:10])
    reader.read()
    assert reader.step == 1
    path.write_text(step(1) + step(2) + '{"event": "fault", "step": 2, "reason": "lost"}\n')
    assert reader.read() == ["step 2: lost"]
    assert reader.step == 2
    assert reader.read() == []
    path.write_text(step(1, loss=5.0))
    reader.read()
    assert (reader.step, reader.loss) == (1, 5.0)
    longer = "".join(step(number, loss=0.123456789) for number in range(5))
    path.write_text(longer)  # cut, and written on before anybody looked
    reader.read()
    assert (reader.step, reader.loss) == (4, 0.123456789)


def test_progress_on_a_terminal_and_off_it(tmp_path):
    (tmp_path / "metrics").mkdir()
    sync = {"event": "sync", "outer_step": 0, "fragment": "all", "sent_bytes": 2500, "seconds": 2, "hidden_seconds": 1}
    for worker in (0, 1):
        (tmp_path / f"metrics/worker-{worker}.jsonl").write_text(step(10) + json.dumps(sync) + "\n")
    texts = []
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=120)
        with console.capture() as captured, LiveProgress(tmp_path, "diloco", 2, 20, console):
            pass
        texts.append(captured.get())
    assert texts[0] == "diloco  step 10/20  loss 2.000  200 tokens/s  1 syncs  2.5 kB sent  50% hidden\n"
    assert "10/20" in texts[1]
    assert "50% hidden" in texts[1]
