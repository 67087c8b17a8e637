"""What every test shares."""

from hypothesis import HealthCheck, settings

# The same examples every time: what fails here fails there. No deadline: on two busy cores
# an example's time says nothing.
settings.register_profile(
    "mpkit",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples, more of them, for a search: pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("mpkit")
