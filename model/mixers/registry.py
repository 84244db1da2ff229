"""The registry of token mixers. To add a mixer, add a file and an entry here."""

from model.attention import softmax
from model.mixers import latent, linear, recurrent, short_convolution
from model.mixers.base import Mixer, MixerSettings

MIXERS: dict[str, tuple[type[MixerSettings], type[Mixer]]] = {
    "attention": (softmax.AttentionMixer, softmax.Attention),
    "latent": (latent.LatentMixer, latent.LatentAttention),
    "linear": (linear.LinearMixer, linear.LinearAttention),
    "recurrent": (recurrent.RecurrentMixer, recurrent.Recurrent),
    "short_convolution": (
        short_convolution.ShortConvolutionMixer,
        short_convolution.ShortConvolution,
    ),
}
