"""One tree of settings for every process of osd, a module for each room that has many.

Nothing here imports torch, so that the command line answers at once.
"""

from osd.config.base import ConfigError, Section
from osd.config.domains import DOMAIN, FULL_DOMAIN, check_domain, in_tenant, tenant_of
from osd.config.drafter import (
    DRAFTER_SETTINGS,
    TRAINED_SETTINGS,
    DrafterSettings,
    EagleSettings,
    FalconSettings,
    KangarooSettings,
    LanguageModelSettings,
    MedusaSettings,
    MixedSettings,
    NoDrafterSettings,
    PromptTokensSettings,
    RecallDrafterSettings,
    RecallSettings,
    drafter_of,
)
from osd.config.growth import (
    GROWTH_SETTINGS,
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    ConfidenceSettings,
    DynamicTreeSettings,
    GrowthSettings,
    HeuristicSettings,
    SparseTreeSettings,
    StaticTreeSettings,
    TopKTreeSettings,
)
from osd.config.settings import (
    CaptureSettings,
    EngineSettings,
    RedisSettings,
    RegistrySettings,
    ServingSettings,
    Settings,
    TargetSettings,
    Verification,
)
from osd.config.sources import load_settings
from osd.config.trainer import TrainerSettings

__all__ = [
    "DOMAIN",
    "DRAFTER_SETTINGS",
    "FULL_DOMAIN",
    "GROWTH_SETTINGS",
    "TRAINED_SETTINGS",
    "AcceptanceHeadSettings",
    "BestFirstSettings",
    "CaptureSettings",
    "ChainSettings",
    "ConfidenceSettings",
    "ConfigError",
    "DrafterSettings",
    "DynamicTreeSettings",
    "EagleSettings",
    "EngineSettings",
    "FalconSettings",
    "GrowthSettings",
    "HeuristicSettings",
    "KangarooSettings",
    "LanguageModelSettings",
    "MedusaSettings",
    "MixedSettings",
    "NoDrafterSettings",
    "PromptTokensSettings",
    "RecallDrafterSettings",
    "RecallSettings",
    "RedisSettings",
    "RegistrySettings",
    "Section",
    "ServingSettings",
    "Settings",
    "SparseTreeSettings",
    "StaticTreeSettings",
    "TargetSettings",
    "TopKTreeSettings",
    "TrainerSettings",
    "Verification",
    "check_domain",
    "drafter_of",
    "in_tenant",
    "load_settings",
    "tenant_of",
]
