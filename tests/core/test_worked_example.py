"""The worked example of continuous batching: six token slots, A to D, two iterations with mixed work."""

from worlds import EOS, World


def test_two_iterations_with_mixed_work():
    world = World(max_num_batched_tokens=6, script={"B": [7, EOS], "C": [7, 8, 9, 10]})
    world.add("B", 2)
    world.add("C", 3)
    world.step()  # B and C are running now, with one token of output each

    world.add("A", 6)
    first = world.schedule()
    world.add("D", 5)  # arrives while the model executes: this iteration is already fixed
    world.update(first)
    second = world.step()

    assert str(first) == "step 2: B+1 C+1 A+4 | 6 tokens | admitted A | A held: token_budget (4 of 6 tokens)"
    assert world.reasons == {"B": "stop"}
    assert str(second) == (
        "step 3: C+1 A+2 D+3 | 6 tokens | admitted D | finished B | D held: token_budget (3 of 5 tokens)"
    )
    assert [admitted.request_id for admitted in second.admitted] == ["D"], "A and C keep their rows"


def test_the_rest_of_the_example_runs_to_its_end():
    world = World(max_num_batched_tokens=6, script={"B": [7, EOS]})
    for request_id, num_prompt in [("B", 2), ("C", 3), ("A", 6), ("D", 5)]:
        world.add(request_id, num_prompt)
    world.run()
    assert {r: len(o) for r, o in world.outputs.items()} == {"B": 2, "C": 4, "A": 4, "D": 4}
