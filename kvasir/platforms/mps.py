"""Apple's GPU through Metal. Its memory is the machine's own; Metal says how much of it one process should take."""

from __future__ import annotations

from kvasir.platforms import Platform


class MpsPlatform(Platform):
    def available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def memory_bytes(self) -> int | None:
        import torch

        return int(torch.mps.recommended_max_memory())

    def memory_free(self) -> int | None:
        import torch

        return max(0, int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory()))

    def memory_used(self) -> int:
        import torch

        return int(torch.mps.current_allocated_memory())

    def memory_peak(self) -> int:
        """What the driver holds: Metal keeps no peak, but freed buffers stay with the process until released."""
        import torch

        return int(torch.mps.driver_allocated_memory())

    def reset_memory_peak(self) -> None:
        self.release_memory()

    def release_memory(self) -> None:
        import torch

        torch.mps.empty_cache()

    def synchronize(self) -> None:
        import torch

        torch.mps.synchronize()

    def _settle_dtype(self, checkpoint_dtype: str) -> str:
        return "float16" if checkpoint_dtype == "float16" else "bfloat16"
