/*
 * Fills vector registers, lets other processes run, and fails when a register has
 * changed, for two seconds. The argument makes several at once differ.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { avx_bytes = 32, avx512_bytes = 64, sched_yield_number = 24 };

/* yield_with_avx returns in got what want has become in a register of AVX. */
static void yield_with_avx(const unsigned char *want, unsigned char *got)
{
	__asm__ volatile("vmovdqu (%0), %%ymm1\n\t"
			 "mov %2, %%eax\n\t"
			 "syscall\n\t"
			 "vmovdqu %%ymm1, (%1)"
			 : : "r"(want), "r"(got), "i"(sched_yield_number) : "rax", "rcx", "r11", "xmm1", "memory");
}

/* yield_with_avx512 does the same with a register that only AVX-512 has. */
static void yield_with_avx512(const unsigned char *want, unsigned char *got)
{
	__asm__ volatile("vmovdqu64 (%0), %%zmm17\n\t"
			 "mov %2, %%eax\n\t"
			 "syscall\n\t"
			 "vmovdqu64 %%zmm17, (%1)"
			 : : "r"(want), "r"(got), "i"(sched_yield_number) : "rax", "rcx", "r11", "memory");
}

int main(int argc, char **argv)
{
	unsigned char want[avx512_bytes], got[avx512_bytes];
	time_t end = time(NULL) + 2;

	memset(want, argc > 1 ? atoi(argv[1]) : 7, sizeof want);
	while (time(NULL) < end) {
		if (__builtin_cpu_supports("avx")) {
			yield_with_avx(want, got);
			if (memcmp(want, got, avx_bytes))
				return puts("a register of AVX has changed"), 1;
		}
		if (__builtin_cpu_supports("avx512f")) {
			yield_with_avx512(want, got);
			if (memcmp(want, got, avx512_bytes))
				return puts("a register of AVX-512 has changed"), 1;
		}
	}
	return 0;
}
