// xstate.c makes user-mode Linux boot on processors whose registers take more than its kernel knows of, such as those of AMX.
// Since 5.14 the host's kernel takes all of them or none (xstateregs_set in arch/x86/kernel/fpu/regset.c), and until 6.13
// user-mode Linux keeps room for what there was by its time. run.sh preloads this (ld.so(8)).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

// ptrace sets the registers that it is given as a part, and leaves the rest as they are.
long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(enum __ptrace_request, ...);
	static _Alignas(64) char all[1 << 14];
	struct iovec whole = { all, sizeof(all) }, *part;
	va_list args;
	int pid;
	void *address, *data;

	va_start(args, request);
	pid = va_arg(args, int);
	address = va_arg(args, void *);
	data = va_arg(args, void *);
	va_end(args);
	if (!next)
		next = dlsym(RTLD_NEXT, "ptrace");
	part = data;
	if (request != PTRACE_SETREGSET || address != (void *)NT_X86_XSTATE || next(PTRACE_GETREGSET, pid, address, &whole) ||
	    whole.iov_len <= part->iov_len)
		return next(request, pid, address, data);
	memcpy(all, part->iov_base, part->iov_len);
	return next(request, pid, address, &whole);
}
