"""The registry of token mixers. To add a mixer, add a file and an entry here."""

from model.mixers import latent, linear, recurrent, short_convolution, softmax
from model.mixers.mixer import Mixer, MixerSettings

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
