# SPDX-License-Identifier: Apache-2.0
"""Tables of the site that are generated from the code, one file for each subject."""

from collections.abc import Callable

from .catalogues import (
    algorithms,
    ascents,
    cards,
    choices,
    families,
    judges,
    preference_losses,
    published,
    refusals,
    regressions,
    suites,
    text_rewards,
    trl_names,
)
from .curves import curves, equal_cost
from .reference import api, commands, face, include, python
from .runs import configs, metrics
from .settings import settings

_GROUPS = (
    (
        algorithms,
        ascents,
        cards,
        choices,
        families,
        judges,
        preference_losses,
        published,
        refusals,
        regressions,
        suites,
        text_rewards,
        trl_names,
    ),
    (configs, curves, equal_cost, metrics, settings),
    (api, commands, face, include, python),
)
MACROS: dict[str, Callable[..., str]] = {macro.__name__: macro for group in _GROUPS for macro in group}
"""name on a page -> function."""
