from pt2e_quant.analysis.tuned import Point, front_of
from pt2e_quant.backends.target.recipe_file import RecipeFile


def point(size, metric, given_up=0.0):
    made = RecipeFile(backend="onnx")
    return Point(
        label="", metric=metric, size=size, share_quantized=1.0, recipe=made, given_up=given_up
    )


def test_front_of_when_points_are_dominated_then_left_out():
    points = (point(30, 0.9), point(10, 0.5), point(20, 0.4), point(30, 0.95), point(40, 0.95))
    found = [(p.size, p.metric) for p in front_of(points)]
    assert found == [(10, 0.5), (30, 0.95)]


def test_front_of_when_low_is_better_then_turned():
    points = (point(10, 0.5), point(20, 0.4), point(30, 0.45))
    found = [(p.size, p.metric) for p in front_of(points, higher_is_better=False)]
    assert found == [(10, 0.5), (20, 0.4)]


def test_front_of_when_a_point_is_nearer_to_the_recipe_then_kept():
    points = (point(10, 0.9, 3.0), point(20, 0.8, 1.0), point(30, 0.7, 1.0), point(40, 0.6, 0.0))
    found = [(p.size, p.given_up) for p in front_of(points)]
    assert found == [(10, 3.0), (20, 1.0), (40, 0.0)]
