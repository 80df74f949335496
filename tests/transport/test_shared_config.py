import pytest

from isthmus.core import UserError
from isthmus.transport.shared_config import check_shared_configs


def test_equal_configurations_pass():
    check_shared_configs([{"a": "1"}, {"a": "1"}])


def test_names_the_key_both_values_and_the_workers():
    with pytest.raises(UserError) as error:
        check_shared_configs([{"seed": "0", "outer.schedule.local_steps": steps} for steps in ("50", "40")])
    assert str(error.value) == "workers differ in outer.schedule.local_steps: worker 0 has 50, worker 1 has 40"


def test_groups_workers_and_counts_what_it_does_not_show():
    one, other = {f"key{i}": "1" for i in range(5)}, {f"key{i}": "2" for i in range(4)}
    with pytest.raises(UserError) as error:
        check_shared_configs([one, other, one])
    shown = "; in ".join(f"key{i}: workers 0, 2 have 1, worker 1 has 2" for i in range(3))
    assert str(error.value) == f"workers differ in {shown}; and in 2 more"


def test_a_missing_key_differs():
    with pytest.raises(UserError, match="workers differ in b: worker 0 has nothing, worker 1 has 2"):
        check_shared_configs([{"a": "1"}, {"a": "1", "b": "2"}])
