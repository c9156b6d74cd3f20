"""Imported, it lets `transformers` and `peft` load exports by this package's code instead of the copy in their folder:
``pipeline("text-classification", model=FOLDER)`` then needs no ``trust_remote_code``."""

from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

from headstart.export.modeling_headstart import HeadstartConfig, HeadstartForClassification

AutoConfig.register("headstart", HeadstartConfig, exist_ok=True)
for _auto in (AutoModelForSequenceClassification, AutoModelForImageClassification):
    _auto.register(HeadstartConfig, HeadstartForClassification, exist_ok=True)
